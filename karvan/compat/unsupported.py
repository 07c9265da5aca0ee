"""The errors of all adapters: `UnsupportedError`, what has no counterpart, and `UsageError`, wrong calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn


class UnsupportedError(NotImplementedError):
    """Says what is not supported, and what to use instead."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what} is not supported: {instead} See docs/migrating.md.")


class UsageError(ValueError):
    """A command of another system was called, or is to run something, in a way that cannot be.

    `karvan run` shows its text alone; other errors of a program have their traceback.
    """


def require_default(what: str, value: Any, default: Any, instead: str) -> None:
    """Raise unless an option that has no counterpart has its default."""
    if value is not default and value != default:
        raise UnsupportedError(f"{what}={value!r}", instead)


def require_defaults(kind: Any, record: Any, options: Mapping[str, str]) -> None:
    """Raise unless the fields of a dataclass that have no counterpart have their defaults.

    options: what to use instead of each.
    """
    for name, instead in options.items():
        default = kind.__dataclass_fields__[name].default
        require_default(f"{kind.__name__} {name}", getattr(record, name), default, instead)


def unsupported_method(what: str, instead: str) -> Callable[..., NoReturn]:
    """A method that has no counterpart: calling it is an error."""

    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise UnsupportedError(what, instead)

    return refuse


def refuse_methods(kind: type, names: Mapping[str, str]) -> None:
    """Raise if a class of the program defines a method that would never be called."""
    for name in vars(kind):
        if name in names:
            raise UnsupportedError(f"{name} of {kind.__name__}", names[name])
