"""The YAML of settings files and of --set."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as most people expect it: 1e-3 is a number, `no` and `on` are text, a repeated key is an error."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in found
        if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:\d[\d_]*)?\.\d+(?:[eE][-+]?\d+)?|\d[\d_]*\.?[eE][-+]?\d+|\d[\d_]*\.|\.(?:inf|nan))$"
    ),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            raise yaml.MarkedYAMLError(None, None, f"the key '{key.value}' appears twice", key.start_mark)
        seen.add(key.value)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str) -> Any:
    """A piece of YAML."""
    return yaml.load(text, _Loader)


def place_of(error: yaml.YAMLError) -> str:
    """The line and column of an error, and its text."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem}." if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}."
