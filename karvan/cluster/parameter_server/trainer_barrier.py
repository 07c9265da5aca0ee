"""A barrier of trainers: work that all of them request is done once, when all have asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from karvan.activity import TRAINERS, activity

T = TypeVar("T")


class TrainerBarrier:
    """Barriers by name; every trainer takes part in each of them once."""

    def __init__(self, trainers: int, timeout: float) -> None:
        self._trainers = trainers
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: dict[Hashable, _Round] = {}
        self._ended = ""

    def take_part(self, name: Hashable, trainer: int, value: Any, work: Callable[[list[Any]], T]) -> T:
        """The result of `work` on the values of all trainers, in their order; the last to arrive runs it."""
        with self._lock:
            if self._ended:
                raise RuntimeError(self._ended)
            round_ = self._open.setdefault(name, _Round())
            round_.values[trainer] = value
            last = len(round_.values) == self._trainers
            if last:
                del self._open[name]
        if last:
            round_.do(lambda: work([round_.values[each] for each in range(self._trainers)]))
        elif not self._waited(round_):
            missing = sorted(set(range(self._trainers)) - set(round_.values))
            raise RuntimeError(
                f"expected all {self._trainers} trainers within {self._timeout:.0f} s, "
                f"got nothing from trainer {', '.join(map(str, missing))}."
            )
        result: T = round_.result()
        return result

    def _waited(self, round_: _Round) -> bool:
        with activity.waiting(TRAINERS):
            return round_.done.wait(self._timeout)

    def end(self, reason: str) -> None:
        """No trainer will come any more; those who wait get the reason."""
        with self._lock:
            self._ended = reason
            waiting, self._open = list(self._open.values()), {}
        for round_ in waiting:
            round_.fail(RuntimeError(reason))


class _Round:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def do(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except Exception as error:
            self._error = error
        self.done.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.done.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result
