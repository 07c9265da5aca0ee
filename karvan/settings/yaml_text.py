"""The YAML of settings files and of --set."""

from __future__ import annotations

import re
from typing import Any

import yaml

_MOST_LEVELS = 100
_MOST_VALUES = 100_000  # aliases counted as what they stand for


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as most people expect it: 1e-3 is a number, `no` and `on` are text, a repeated key is an error."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Brackets within brackets take quadratic time."""
        if self.flow_level == _MOST_LEVELS:
            raise _error(f"expected at most {_MOST_LEVELS} brackets within each other", self.get_mark())
        super().fetch_flow_collection_start(token)


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
        if not isinstance(key, yaml.ScalarNode):
            raise _error("expected a key that is text or a number", key.start_mark)
        if key.value in seen:
            raise _error(f"the key '{key.value}' appears twice", key.start_mark)
        seen.add(key.value)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str) -> Any:
    """A piece of YAML; whatever is wrong with it is a YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError(f"expected at most {_MOST_LEVELS} levels, got more") from None
    except (ValueError, OverflowError, AttributeError, TypeError) as error:  # of a tag, such as a date
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    finally:
        loader.dispose()


def _check_size(root: yaml.Node) -> None:
    """A YAMLError if aliases make a tree that is endless, or larger than a file would be."""
    sizes: dict[yaml.Node, int | None] = {}  # None: being counted

    def size_of(node: yaml.Node) -> int:
        if node in sizes:
            size = sizes[node]
            if size is None:
                raise _error("an alias stands for a value that it is in", node.start_mark)
            return size
        sizes[node] = None
        size = 1
        if isinstance(node, yaml.SequenceNode):
            size += sum(map(size_of, node.value))
        elif isinstance(node, yaml.ScalarNode):
            node.value.encode()  # "\\ud800" is no character
        elif isinstance(node, yaml.MappingNode):
            size += sum(size_of(key) + size_of(value) for key, value in node.value)
        if size > _MOST_VALUES:
            raise _error(f"expected at most {_MOST_VALUES:,} values, got more", node.start_mark)
        sizes[node] = size
        return size

    size_of(root)


def _error(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, mark)


def place_of(error: yaml.YAMLError) -> str:
    """The line and column of an error, and its text."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem}." if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}."
