"""Checks of arguments that are numbers or text, and the text of errors about unknown names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import takewhile
from numbers import Integral
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
            wrong = [part for part in parts if not (_is_whole(part) if whole else _is_number(part))]
            if kind.startswith("tuple") and len(parts) != 2:
                wrong, expected = [value], f"two {expected.split()[-1]}s"
        if wrong:
            raise TypeError(f"{title} expects {expected} as {name}, got {wrong[0]!r}.")


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    """Whether it is an integer, or a float without a fraction: `LRU(capacity=1e9)`."""
    return _is_number(value) and (hasattr(value, "__index__") or float(value).is_integer())


@cache
def _declared_kinds(call: Callable[..., Any]) -> dict[str, str]:
    """The arguments of a call that are declared as numbers, text or booleans."""
    import inspect

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
