"""Dense parameters that are updated in the trainer."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from karvan.dense.step_policies import Outcome, Staleness
from karvan.torch_internals import skips_on_device, step_unless


class LocalDense:
    """Parameters that step in this process; `RemoteDense` and `PeriodicAveraging` derive from it."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer

    @property
    def staleness(self) -> Staleness:
        """How far gradients were behind when they were applied: not at all."""
        return Staleness()

    def begin(self) -> None:
        """Training starts with the model as it is now; a collective."""

    def fresh(self) -> None:
        """Get the newest parameters, before a step."""

    def attempts(self) -> Generator[int, None, None]:
        """Attempts at a step; the caller stops after one that is not rejected."""
        yield 0

    def agree(self, finite: bool) -> bool:
        """Whether gradients are finite on all ranks that must make a step together.

        Averaged gradients need no message for that: they are the same on all ranks.
        """
        return finite

    def step(self) -> Outcome:
        """Make a step with the current gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
        return "accepted"

    @property
    def skips_on_device(self) -> bool:
        """Whether `step_unless` works for the next step."""
        return self.optimizer is None or skips_on_device(self.optimizer)

    def step_unless(self, found_inf: Tensor) -> None:
        """Make a step unless this float on the parameters' device is 1.0; without waiting for it."""
        if self.optimizer is not None:
            step_unless(self.optimizer, found_inf)

    def settle(self) -> None:
        """Wait for all trainers' steps and get the resulting parameters; a collective."""

    def take(self) -> None:
        """As `settle`, and on rank 0 get the optimizer's state, too."""
