"""Policies of when pushed gradients become a step."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from karvan.torch_internals import skips_on_device, step_unless

Outcome: TypeAlias = Literal["accepted", "rejected", "not finite"]  # of a trainer's push to all servers


@dataclass(frozen=True)
class Answer:
    """The outcome of a push of gradients.

    accepted: whether it counts, now or later; applied: whether this push made a step.
    version: the server's version after it; staleness: how many versions the gradients were behind before it.
    reason, if not accepted: "stale", "ahead" (of a server that lost steps), "not finite", or "forgotten",
    a sequence number so old that it is unknown whether it was applied.
    """

    accepted: bool
    version: int
    applied: bool
    staleness: int = 0
    reason: str = ""


@dataclass(frozen=True)
class AsyncPolicy:
    """Every push is a step; staleness_modulation divides its learning rate by max(1, staleness)."""

    staleness_modulation: bool = False
    grads_to_wait: ClassVar[int] = 1

    def rejects(self, staleness: int) -> bool:
        """Whether gradients are too far behind: never."""
        return False

    def slowed(self, rate: float, staleness: int) -> float:
        """The learning rate for gradients so far behind."""
        return rate / max(1, staleness) if self.staleness_modulation else rate


@dataclass(frozen=True)
class SyncPolicy:
    """grads_to_wait pushes make a step; those more than `tolerance` versions behind are rejected."""

    grads_to_wait: int = 1
    tolerance: int = 0

    def __post_init__(self) -> None:
        if self.grads_to_wait < 1:
            raise ValueError(f"grads_to_wait must be at least 1, got {self.grads_to_wait}.")
        if self.tolerance < 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance}.")

    def rejects(self, staleness: int) -> bool:
        """Whether gradients are too far behind."""
        return staleness > self.tolerance

    def slowed(self, rate: float, staleness: int) -> float:
        """The learning rate for gradients so far behind: the same."""
        return rate


Policy: TypeAlias = AsyncPolicy | SyncPolicy


@dataclass
class Staleness:
    """How far this trainer's gradients were behind when they arrived, rejected ones included."""

    pushes: int = 0
    largest: int = 0
    total: int = 0
    rejected: int = 0

    @property
    def mean(self) -> float:
        """The mean over pushes, each by the server where it was furthest behind."""
        return self.total / self.pushes if self.pushes else 0.0


# Dense parameters that are updated in the trainer.


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
