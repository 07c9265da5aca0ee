"""Recent answers by caller, so that a push that is sent twice is applied once.

Each trainer numbers its pushes. The answers to its last `window` numbers are remembered; a push with one of
these is answered as it was the first time. Older numbers are refused: it is not known any more whether they
were applied. A window has to be longer than the number of pushes that a trainer can have in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
