"""How long a fit runs, and when it evaluates."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

from karvan.argument_checks import check_integers
from karvan.train.reporting.results import TrainingCounts
from karvan.train.step.accumulation import Accumulation


@dataclass(frozen=True)
class Goal:
    """So many epochs or optimizer steps, whichever comes first; both count training on this data.

    Without either it is one epoch. An evaluation comes every `eval_every` steps, or after each epoch, and at
    the end.
    """

    epochs: int | None
    max_steps: int | None
    eval_data: Iterable[Any] | None
    eval_every: int | None

    def __post_init__(self) -> None:
        check_integers(epochs=self.epochs, max_steps=self.max_steps, eval_every=self.eval_every)
        for name in ("epochs", "max_steps", "eval_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}.")
        if self.eval_every is not None and self.eval_data is None:
            raise ValueError(f"eval_every={self.eval_every} needs eval_data, got None.")
        if self.epochs is None and self.max_steps is None:
            object.__setattr__(self, "epochs", 1)

    def reached(self, counts: TrainingCounts) -> bool:
        """Whether nothing more is to be trained."""
        return (self.epochs is not None and counts.epoch >= self.epochs) or (
            self.max_steps is not None and counts.step - counts.start_step >= self.max_steps
        )

    @property
    def text(self) -> str:
        """The goal, as text."""
        given = {"epoch": self.epochs, "step": self.max_steps}
        return " or ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n in given.items() if n is not None)

    def evaluates_after_step(self, counts: TrainingCounts) -> bool:
        """Whether an evaluation is due."""
        return self.eval_every is not None and counts.step % self.eval_every == 0

    def steps(self, data: Iterable[Any], passes: Accumulation, counts: TrainingCounts) -> int | None:
        """The step at which training ends, if that can be known; ranks are taken to have equal data."""
        length = _length(data)
        limit = None if self.max_steps is None else counts.start_step + self.max_steps
        if self.epochs is None or length is None:
            return limit
        per_epoch = passes.steps(length)
        left = getattr(data, "batches_left", None)
        if not counts.batches:
            current = per_epoch
        elif left is None:
            current = per_epoch - -(-counts.batches // passes.count)
        else:  # the epoch may have started on another number of ranks
            current = passes.steps(left)
        epochs = self.epochs - counts.epoch
        steps = counts.step + (current + (epochs - 1) * per_epoch if epochs > 0 else 0)
        return steps if limit is None else min(steps, limit)


def _length(data: Iterable[Any]) -> int | None:
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # it has no end
        return None
