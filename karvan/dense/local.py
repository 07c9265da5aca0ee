"""Dense parameters that are updated in the trainer."""

from __future__ import annotations

from collections.abc import Generator

import torch

from karvan.dense.step_policies import Outcome, Staleness


class LocalDense:
    """Parameters that step in this process; `DenseAway` derives from it."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer

    @property
    def staleness(self) -> Staleness:
        """How far gradients were behind when they were applied: not at all."""
        return Staleness()

    def begin(self) -> None:
        """The model is as training is to begin with; a collective."""

    def fresh(self) -> None:
        """Have the newest parameters that there are, before a step."""

    def attempts(self) -> Generator[int, None, None]:
        """Attempts at a step; who makes one that is not rejected asks for no more."""
        yield 0

    def step(self) -> Outcome:
        """Make a step with the gradients there are."""
        if self.optimizer is not None:
            self.optimizer.step()
        return "accepted"

    def settle(self) -> None:
        """Have the parameters that all trainers have made together; a collective."""

    def take(self) -> None:
        """The same, and on rank 0 the optimizer's state."""
