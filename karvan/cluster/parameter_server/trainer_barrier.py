"""A barrier of trainers: what all of them ask for is done once, when all have asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from karvan.activity import TRAINERS, activity

T = TypeVar("T")


class TrainerBarrier:
    """TrainerBarrier by name, in each of which every trainer takes part once."""

    def __init__(self, trainers: int, timeout: float) -> None:
        self._trainers = trainers
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: dict[Hashable, _Round] = {}
        self._ended = ""

    def take_part(self, name: Hashable, trainer: int, value: Any, work: Callable[[list[Any]], T]) -> T:
        """What `work` makes of the values of all trainers, in their order; the last to come does it."""
        with self._lock:
            if self._ended:
                raise RuntimeError(self._ended)
            one = self._open.setdefault(name, _Round())
            one.values[trainer] = value
            last = len(one.values) == self._trainers
            if last:
                del self._open[name]
        if last:
            one.do(lambda: work([one.values[each] for each in range(self._trainers)]))
        elif not self._waited(one):
            missing = sorted(set(range(self._trainers)) - set(one.values))
            raise RuntimeError(
                f"expected all {self._trainers} trainers within {self._timeout:.0f} s, "
                f"got nothing from trainer {', '.join(map(str, missing))}."
            )
        made: T = one.result()
        return made

    def _waited(self, one: _Round) -> bool:
        with activity.waiting(TRAINERS):
            return one.done.wait(self._timeout)

    def end(self, reason: str) -> None:
        """Nobody will come any more; those who wait get the reason."""
        with self._lock:
            self._ended = reason
            waiting, self._open = list(self._open.values()), {}
        for one in waiting:
            one.fail(RuntimeError(reason))


class _Round:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.done = threading.Event()
        self._made: Any = None
        self._error: Exception | None = None

    def do(self, work: Callable[[], Any]) -> None:
        try:
            self._made = work()
        except Exception as error:
            self._error = error
        self.done.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.done.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._made
