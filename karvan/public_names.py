"""`publish`: the public names of a module, imported at first use and suggested for misspelled ones.

A public module calls it behind its `__all__`. From then on `dir()` of the module lists these names alone. A
name that it does not have is an error that says which one may be meant, and so is an argument that one of its
functions or classes does not have, or one of another kind than the number or text that they declare.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

from karvan.argument_checks import check_kinds, meant

_MARK = "__explains_arguments__"


def publish(name: str, homes: Mapping[str, str] | None = None) -> None:
    """Publish what `__all__` of a module lists.

    homes: modules, and the names that come from them, which are imported when they are first used. A name in
    the module itself, or of a module in its home, is that module: `{"karvan": "data ids"}`.
    """
    scope = vars(sys.modules[name])
    public: list[str] = scope["__all__"]
    home_of = {name: home for home, names in (homes or {}).items() for name in names.split()}
    for public_name in [name for name in public if name in scope]:
        scope[public_name] = explained(scope[public_name])

    def attribute(wanted: str) -> Any:
        home = home_of.get(wanted)
        if home is None:
            text = f"module '{name}' has no attribute '{wanted}'.{meant(wanted, public)}"
            raise AttributeError(text, name=None)  # without it Python prints a suggestion of its own, too
        value = None if home == name else getattr(importlib.import_module(home), wanted, None)
        if value is None:
            value = importlib.import_module(f"{home}.{wanted}")
        scope[wanted] = value = explained(value)  # the next access needs no call of this function
        return value

    scope["__getattr__"], scope["__dir__"] = attribute, lambda: sorted(public)


def explained(value: Any) -> Any:
    """A function or class of Karvan whose errors about unknown arguments say which one may be meant."""
    if isinstance(value, type):
        for kind in value.__mro__:
            if kind.__module__.startswith("karvan.") and not getattr(kind, "_is_protocol", False):
                _explain_methods(kind)
        return value
    if not isinstance(value, FunctionType) or hasattr(value, _MARK):
        return value
    name: str = value.__name__
    explained, home = _explained(value, name), sys.modules[value.__module__]
    if vars(home).get(name) is value:  # pickles find it by this name
        setattr(home, name, explained)
    return explained


def _explain_methods(kind: type) -> None:
    """The same for how a class is made, and for public methods that take numbers or have defaults.

    Not for `forward`, which others look into, such as TorchScript.
    """
    for name, member in list(vars(kind).items()):
        bound = type(member) if isinstance(member, classmethod | staticmethod) else None
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if not isinstance(function, FunctionType) or hasattr(function, _MARK):
            continue
        if name == "__init__":
            explained: Any = _explained(function)
        elif name[0] != "_" and name != "forward" and _has_options(function):
            explained = _explained(function, f"{kind.__name__}.{name}")
        else:
            continue
        setattr(kind, name, explained if bound is None else bound(explained))


def _has_options(method: FunctionType) -> bool:
    declared = {kind for name, kind in method.__annotations__.items() if name != "return"}
    return bool(method.__defaults__ or method.__kwdefaults__ or declared & {"int", "float"})


def _explained(call: FunctionType, title: str | None = None) -> Callable[..., Any]:
    """The call with better errors; without a title it is the `__init__` of the object that comes first."""
    positions = call.__code__.co_varnames[: call.__code__.co_argcount]

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        named = title or type(args[0]).__name__
        check_kinds(named, call, {**dict(zip(positions, args, strict=False)), **kwargs})
        try:
            return call(*args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            if not kwargs or trace is None or trace.tb_next is not None:  # it was raised inside of the call
                raise
            parameters = inspect.signature(call).parameters
            unknown = [name for name in kwargs if name not in parameters]
            if not unknown or any(
                parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
            ):
                raise
            names = [name for name in parameters if name != "self"]
            text = meant(unknown[0], names) or f" It has: {', '.join(names) or 'none'}."
            raise TypeError(f"{named}() has no argument '{unknown[0]}'.{text}") from None

    setattr(checked, _MARK, True)
    return checked
