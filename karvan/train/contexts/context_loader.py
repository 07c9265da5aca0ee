"""`ContextLoader`: the iterable of batches that `loader` of a context gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class ContextLoader:
    """Data in a context; each iteration starts from the beginning, or where the context says."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()
