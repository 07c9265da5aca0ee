"""Work that can be requested again while it is in progress, and is done once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class SingleFlight:
    """Who asks for work that is under way gets what it makes; what has been done is not remembered here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Hashable, Future[Any]] = {}

    def do(self, name: Hashable, work: Callable[[], T]) -> T:
        """Do it, or wait for who does it already."""
        with self._lock:
            found = self._open.get(name)
            mine = found is None
            one: Future[T] = Future() if found is None else found
            self._open[name] = one
        if mine:
            try:
                one.set_result(work())
            except Exception as error:
                one.set_exception(error)
            finally:
                with self._lock:
                    del self._open[name]
        return one.result()
