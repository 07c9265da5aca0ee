"""How long a fit goes on, and when it evaluates."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

from karvan.train.passes import Passes
from karvan.train.results import Counts


@dataclass(frozen=True)
class Goal:
    """Whatever comes first: so many epochs, or so many optimizer steps; both count from the very beginning.

    Without either it is one epoch. An evaluation comes every `eval_every` steps, or after each epoch, and at
    the end.
    """

    epochs: int | None
    train_steps: int | None
    eval_data: Iterable[Any] | None
    eval_every: int | None

    def __post_init__(self) -> None:
        for name in ("epochs", "train_steps", "eval_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}.")
        if self.eval_every is not None and self.eval_data is None:
            raise ValueError(f"eval_every={self.eval_every} needs eval_data, got None.")
        if self.epochs is None and self.train_steps is None:
            object.__setattr__(self, "epochs", 1)

    def reached(self, counts: Counts) -> bool:
        """Whether nothing more is to be trained."""
        return (self.epochs is not None and counts.epoch >= self.epochs) or (
            self.train_steps is not None and counts.step >= self.train_steps
        )

    def evaluates_after_step(self, counts: Counts) -> bool:
        """Whether an evaluation is due."""
        return self.eval_every is not None and counts.step % self.eval_every == 0

    def steps(self, data: Iterable[Any], passes: Passes) -> int | None:
        """How many steps that will be, if it can be known; ranks are taken to have equal data."""
        if self.epochs is None or not isinstance(data, Sized):
            return self.train_steps
        steps = self.epochs * -(-len(data) * passes.world // passes.batches)
        return steps if self.train_steps is None else min(steps, self.train_steps)
