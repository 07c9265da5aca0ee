"""Checks of arguments, errors about unknown names, and `publish`, which gives both to a public module."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from itertools import takewhile
from numbers import Integral
from types import FunctionType
from typing import Any


def is_integer(value: Any) -> bool:
    """Whether it is an integer. A bool is not: `batch_size=True` does not say how many."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integers(**values: Any) -> None:
    """Raise unless all are integers, or None."""
    for name, value in values.items():
        if value is not None and not is_integer(value):
            raise TypeError(f"{name} must be an integer, but is {value!r} ({type(value).__name__}).")


def check_counts(least: int, **values: Any) -> None:
    """Raise unless all are integers of at least `least`, or None."""
    check_integers(**values)
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, but is {value}.")


_OPTIONAL = " | None"
_NUMBERS = ("int", "float", "Number", "tuple[int, int]", "tuple[float, float]")


def check_kinds(title: str, call: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise a TypeError unless arguments of a call are numbers, text, or True or False, as it declares them.

    Text such as '0.1' and booleans are no numbers. Other declarations are not checked.
    """
    for name, declared in _declared_kinds(call).items():
        if name not in values:
            continue
        value, kind = values[name], declared.removesuffix(_OPTIONAL)
        if value is None and kind != declared:
            continue
        if kind == "str":
            wrong, expected = [] if isinstance(value, str) else [value], "text"
        elif kind == "bool":
            wrong = [] if isinstance(value, int) or type(value).__name__ == "bool" else [value]  # or numpy's
            expected = "True or False"
        else:
            parts = value if kind.startswith("tuple") and isinstance(value, list | tuple) else [value]
            whole = "int" in kind
            expected = "an integer" if whole else "a number"
            # An integer may be a float without a fraction: `LRU(capacity=1e9)`.
            wrong = [
                part
                for part in parts
                if isinstance(part, bool)
                or not hasattr(part, "__float__")
                or (whole and not (hasattr(part, "__index__") or float(part).is_integer()))
            ]
            if kind.startswith("tuple") and len(parts) != 2:
                wrong, expected = [value], f"two {expected.split()[-1]}s"
        if wrong:
            raise TypeError(f"{title} expects {expected} as {name}, got {wrong[0]!r}.")


@cache
def _declared_kinds(call: Callable[..., Any]) -> dict[str, str]:
    """The arguments of a call that are declared as numbers, text or booleans."""
    declared = {}
    for name, parameter in inspect.signature(call).parameters.items():
        kind = parameter.annotation
        text = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        if text.removesuffix(_OPTIONAL) in (*_NUMBERS, "bool", "str"):
            declared[name] = text
    return declared


def listed(name: object, options: Iterable[object]) -> str:
    """The known names as the end of a sentence, and the closest: "user, item. Did you mean 'item'?"."""
    names = [str(option) for option in (options.keys() if isinstance(options, Mapping) else options)]
    return f"{', '.join(names) or 'nothing'}.{meant(name, names)}"


def meant(name: object, names: Iterable[str]) -> str:
    """A question for the name that may be meant, " Did you mean 'item'?"; nothing if none is close."""
    import difflib  # only errors need it

    wrong = str(name).casefold()
    folded = {name.casefold(): name for name in names}  # 'Auc' is as close to 'AUC' as can be

    def likeness(other: str) -> float:
        # 'admission' means 'admit', not 'missing'
        same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(wrong, other, strict=False))])
        begins_alike = same >= 3 and same / min(len(wrong), len(other)) >= 0.75
        return difflib.SequenceMatcher(None, other, wrong).ratio() + 0.5 * begins_alike

    nearest = max(folded, key=likeness, default="")
    return f" Did you mean '{folded[nearest]}'?" if nearest and likeness(nearest) >= 0.6 else ""


# `publish`: the public names of a module, imported at first use and suggested for misspelled ones.
#
# A public module calls it behind its `__all__`. From then on `dir()` of the module lists these names alone. A
# name that it does not have is an error that says which one may be meant, and so is an argument that one of
# its functions or classes does not have, or one of another kind than the number or text that they declare.

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
