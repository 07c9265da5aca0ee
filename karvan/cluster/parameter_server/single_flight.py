"""Work that can be requested again while it is in progress, and is done once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class SingleFlight:
    """A request for work that is in progress shares its result; finished work is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Hashable, Future[Any]] = {}

    def do(self, name: Hashable, work: Callable[[], T]) -> T:
        """Do the work, or wait for the thread that is doing it."""
        with self._lock:
            found = self._open.get(name)
            is_first = found is None
            future: Future[T] = Future() if found is None else found
            self._open[name] = future
        if is_first:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            finally:
                with self._lock:
                    del self._open[name]
        return future.result()
