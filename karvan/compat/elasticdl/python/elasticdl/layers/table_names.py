"""`table_name`: names of tables for layers that have none, numbered as Keras does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_counts: Counter[str] = Counter()


def table_name(kind: str, given: str | None) -> str:
    """The name that was given, or that of the kind with the number of layers before."""
    if given is not None:
        return given
    number = _counts[kind]
    _counts[kind] += 1
    return f"{kind}_{number}" if number else kind


@contextmanager
def new_model() -> Iterator[None]:
    """Within it numbers begin at 0, so that a model has the same names whenever it is made."""
    before = _counts.copy()
    _counts.clear()
    try:
        yield
    finally:
        _counts.clear()
        _counts.update(before)
