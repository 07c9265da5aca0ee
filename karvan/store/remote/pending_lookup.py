"""`PendingLookup`: a batch whose remote lookup may run ahead of its forward."""

from __future__ import annotations

from abc import ABC, abstractmethod

from karvan.store.program import LookupProgram


class PendingLookup(ABC):
    """A lookup's arguments and state; `ServerLookup` asks parameter servers, `WorkerLookup` a worker."""

    def __init__(self, program: LookupProgram, *, training: bool, step: int, now: float) -> None:
        self.program = program
        self.training = training
        self.step = step
        self.now = now
        self.number = 0  # of a training lookup that has started
        self.started = False
        self.offered = False  # to the staleness window, which starts it when there is room

    def begin(self, number: int) -> None:
        """Send the request; training lookups are numbered from 1, others have no number (0)."""
        self.number = number
        self.started = True
        self._ask()

    def fits(self, training: bool, step: int, now: float) -> bool:
        """Whether it is, or can be made, the lookup that a forward needs."""
        if not self.started and not self.offered:
            self.training, self.step, self.now = training, step, now
        return self.training == training and (self.step == step or not training)

    @abstractmethod
    def _ask(self) -> None:
        """Send the request, without waiting for the answer."""

    @abstractmethod
    def ready(self) -> tuple[bool, float]:
        """Whether the answer has still to come; if not, the time when it came."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the answer, and fill the outputs."""
