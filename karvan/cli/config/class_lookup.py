"""Finds classes by name, checks their arguments and creates them; errors name the config key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from karvan.argument_checks import listed
from karvan.cli.config.schema import Named
from karvan.cli.errors import CommandError


def classes_of(module: Any, base: type) -> dict[str, Any]:
    """The public classes of a module that derive from one."""
    return {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, base) and each is not base and name[0] != "_"
    }


def find_class(what: str, known: Mapping[str, Any], name: str) -> Any:
    """The class of that name."""
    if name not in known:
        raise CommandError(f"There is no {what} '{name}'; there are: {listed(name, sorted(known))}")
    return known[name]


def make_by_name(
    what: str, known: Mapping[str, Any], choice: Named, where: str, hidden: Sequence[str] = ()
) -> Any:
    """Create one of the known classes with its arguments; `hidden` are arguments that the caller adds."""
    kind = find_class(what, known, choice.name)
    check_arguments(kind, where, (), choice.arguments, hidden)
    return build(where, kind, **choice.arguments)


def check_arguments(
    kind: Callable[..., Any],
    where: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hidden: Sequence[str],
) -> None:
    """Raise unless `kind` can be called with these arguments; the error lists those it has."""
    signature = inspect.signature(kind)
    allowed = [name for name in signature.parameters if name not in hidden]
    for name in kwargs:
        if name not in allowed:
            raise CommandError(f"{where}: unknown key '{name}'; there are: {listed(name, allowed)}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CommandError(f"{where}: {error}; it takes: {', '.join(allowed) or 'nothing'}.") from error


def build(where: str, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `make`; its errors name the key of the config."""
    try:
        return make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{where}: {error}") from error
