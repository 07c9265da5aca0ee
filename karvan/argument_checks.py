"""Checks of integer arguments, and the text of errors about unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def listed(name: object, known: Iterable[object]) -> str:
    """The known names as the end of a sentence, and the closest: "user, item. Did you mean 'item'?"."""
    import difflib  # only errors need it

    names = [str(each) for each in (known.keys() if isinstance(known, Mapping) else known)]
    nearest = difflib.get_close_matches(str(name), names, n=1)
    meant = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return f"{', '.join(names) or 'nothing'}.{meant}"
