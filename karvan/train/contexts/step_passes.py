"""A step of a custom loop: its batches, and the one that is being computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from karvan.train.feed.batch_source import FedBatch
from karvan.train.feed.epoch import Epoch


@dataclass
class ContextStep:
    """The batches that make a step, how much each counts, and how many have gone through it.

    course is None where the batch is none of a loader's.
    """

    group: list[FedBatch]
    weights: list[float]
    whole: float
    course: Epoch | None = None
    done: int = 0


@dataclass
class Pass:
    """One of a step's batches, by its place, and the model's output for it."""

    step: ContextStep
    place: int
    output: Any = None

    @property
    def batch(self) -> Any:
        """The batch as it was taken."""
        return self.step.group[self.place].batch

    @property
    def weight(self) -> float:
        """How much it counts; 0 without rows."""
        return self.step.weights[self.place]

    @property
    def last(self) -> bool:
        """Whether it completes the step."""
        return self.place == len(self.step.group) - 1


class ContextLoader:
    """Data in a context; `ctx.loader(data)` makes it, and each iteration begins anew."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()
