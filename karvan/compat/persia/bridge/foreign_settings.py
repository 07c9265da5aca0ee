"""PERSIA's configuration files, read as PERSIA does: a key without a meaning is left out, with a warning.

A file is parsed once in a process, so that its warnings appear once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from karvan.settings.schema import Section, SettingsError, checked_settings, read_tree

_UNKNOWN = "it is no key of PERSIA, which passes over it, too."


class Foreign(Section):
    """A section of a configuration of PERSIA.

    older: names of keys in earlier versions, and what they are called now. unused: keys without a
    counterpart: what they are for in PERSIA, and what Karvan does.
    """

    older: ClassVar[Mapping[str, str]] = {}
    unused: ClassVar[Mapping[str, str]] = {}

    def check(self) -> None:
        """Raise for values that are unsupported, and warn of those that have no effect."""


Settings = TypeVar("Settings", bound=Foreign)


def chosen_file(path: str | os.PathLike[str], name: str) -> Path:
    """The path of a configuration file, which has to exist; name: what PERSIA calls it."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"Expected {name} at {path}, which does not exist.")
    return Path(path)


def read_once(kind: type[Settings], path: Path) -> Settings:
    """The settings of a file; the same text is parsed once in a process."""
    made: Settings = _read(kind, path, path.read_bytes())
    return made


@cache
def _read(kind: type[Settings], path: Path, content: bytes) -> Settings:
    tree = read_tree(path)
    return settings_of(kind, {} if tree is None else tree, str(path))


def settings_of(kind: type[Settings], tree: Any, where: str) -> Settings:
    """The settings of a tree, with one warning for each key that is left out; `where` begins all texts."""
    ignored: dict[str, str] = {}
    made = checked_settings(kind, _chosen(kind, tree, where, "", ignored), where)
    made.check()
    for key, reason in ignored.items():
        warnings.warn(f"{where}: {key} of PERSIA has no effect here: {reason}", stacklevel=4)
    return made


def _chosen(kind: type[Foreign], tree: Any, where: str, path: str, ignored: dict[str, str]) -> Any:
    """A tree with the keys that a section has, by their names of now; the others are noted in `ignored`."""
    if not isinstance(tree, Mapping):
        return tree
    chosen: dict[str, Any] = {}
    for key, value in tree.items():
        name = kind.older.get(key, key)
        if name not in kind.model_fields:
            ignored.setdefault(f"{path}{key}", kind.unused.get(key, _UNKNOWN))
            continue
        if name in chosen:
            raise SettingsError(f"{where}: {path}{key} is an older name of {name}, got both.")
        if value is not None:  # a key without a value has its default
            chosen[name] = _below(kind.model_fields[name].annotation, value, where, f"{path}{name}.", ignored)
    return chosen


def _below(kind: Any, value: Any, where: str, path: str, ignored: dict[str, str]) -> Any:
    if isinstance(kind, type) and issubclass(kind, Foreign):
        return _chosen(kind, value, where, path, ignored)
    parts = get_args(kind)
    if get_origin(kind) is dict and isinstance(value, Mapping) and issubclass(parts[1], Foreign):
        return {key: _chosen(parts[1], each, where, f"{path}*.", ignored) for key, each in value.items()}
    return value
