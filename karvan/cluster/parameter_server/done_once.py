"""Work that trainers, or those who ask on their behalf, request more than once, and that is done once.

`SingleFlight`: a request for work that is in progress shares its result.
`TrainerBarrier`: work that all trainers request is done once, when all have asked.
`AnswerWindow`: a push that is sent twice is applied once, and answered as it was the first time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from karvan.activity import TRAINERS, activity

T = TypeVar("T")


class SingleFlight:
    """A request for work that is in progress shares its result; finished work is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Hashable, Future[Any]] = {}

    def do(self, name: Hashable, work: Callable[[], T]) -> T:
        """Do the work, or wait for the thread that is doing it."""
        with self._lock:
            is_first = name not in self._open
            future: Future[T] = self._open.setdefault(name, Future())
        if is_first:
            try:
                _settle(future, work)
            finally:
                with self._lock:
                    del self._open[name]
        return future.result()


class TrainerBarrier:
    """Barriers by name; every trainer takes part in each of them once."""

    def __init__(self, trainers: int, timeout: float) -> None:
        self._trainers = trainers
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: dict[Hashable, tuple[dict[int, Any], Future[Any]]] = {}
        self._ended = ""

    def take_part(self, name: Hashable, trainer: int, value: Any, work: Callable[[list[Any]], T]) -> T:
        """The result of `work` on the values of all trainers, in their order; the last to arrive runs it."""
        future: Future[T]
        with self._lock:
            if self._ended:
                raise RuntimeError(self._ended)
            values, future = self._open.setdefault(name, ({}, Future()))
            values[trainer] = value
            if is_last := len(values) == self._trainers:
                del self._open[name]
        if is_last:
            _settle(future, lambda: work([values[rank] for rank in range(self._trainers)]))
        else:
            with activity.waiting(TRAINERS):
                wait([future], self._timeout)
            if not future.done():
                missing = sorted(set(range(self._trainers)) - set(values))
                raise RuntimeError(
                    f"expected all {self._trainers} trainers within {self._timeout:.0f} s, "
                    f"got nothing from trainer {', '.join(map(str, missing))}."
                )
        return future.result()

    def end(self, reason: str) -> None:
        """No trainer will come any more; those who wait get the reason."""
        with self._lock:
            self._ended = reason
            waiting, self._open = list(self._open.values()), {}
        for _, future in waiting:
            future.set_exception(RuntimeError(reason))


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work, and give its result or its error to all that wait for it."""
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


# Each trainer numbers its pushes. The answers to its last `window` numbers are remembered; a push with one of
# these is answered as it was the first time. Older numbers are refused: it is not known any more whether they
# were applied. A window has to be longer than the number of pushes that a trainer can have in flight.


class AnswerWindow(Generic[T]):
    """Answers by trainer and sequence number."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}.")
        self._window = window
        self._answers: dict[str, dict[int, T]] = {}

    def find(self, trainer: str, sequence: int) -> T | None:
        """What was answered, if that is known."""
        return self._answers.get(trainer, {}).get(sequence)

    def forgotten(self, trainer: str, sequence: int) -> bool:
        """Whether the number is before those that are remembered."""
        return sequence < self.next_sequence(trainer) - self._window

    def next_sequence(self, trainer: str) -> int:
        """The number after the largest one that a trainer has used."""
        return max(self._answers.get(trainer, ()), default=-1) + 1

    def remember(self, trainer: str, sequence: int, answer: T) -> None:
        """Store an answer, and drop those that are too old."""
        answers = self._answers.setdefault(trainer, {})
        answers[sequence] = answer
        oldest = self.next_sequence(trainer) - self._window
        for old in [number for number in answers if number < oldest]:
            del answers[old]

    def forget(self, trainer: str) -> None:
        """Drop the answers of a trainer that will not come back."""
        self._answers.pop(trainer, None)

    def all(self) -> Mapping[str, Mapping[int, T]]:
        """Everything that is remembered."""
        return self._answers

    def load(self, answers: Mapping[str, Mapping[int, Any]]) -> None:
        """Remember these instead."""
        self._answers = {}
        for trainer, its in answers.items():
            for sequence in sorted(its):
                self.remember(trainer, sequence, its[sequence])
