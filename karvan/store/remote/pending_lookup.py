"""`PendingLookup`: a batch whose remote lookup may run ahead of its forward."""

from __future__ import annotations

from abc import ABC, abstractmethod

from karvan.store.program import LookupProgram
from karvan.store.types import LookupContext


class PendingLookup(ABC):
    """A lookup's arguments and state; `ServerLookup` asks parameter servers, `WorkerLookup` a worker."""

    def __init__(self, program: LookupProgram, context: LookupContext) -> None:
        self.program = program
        self.context = context
        self.number = 0  # of a training lookup that has started
        self.started = False
        self.offered = False  # to the staleness window, which starts it when there is room

    def begin(self, number: int) -> None:
        """Send the request; training lookups are numbered from 1, others have no number (0)."""
        self.number = number
        self.started = True
        self._ask()

    def fits(self, context: LookupContext) -> bool:
        """Whether it is, or can be made, the lookup that a forward needs."""
        if not self.started and not self.offered:
            self.context = context
        return self.context.training == context.training and (
            self.context.step == context.step or not context.training
        )

    @abstractmethod
    def _ask(self) -> None:
        """Send the request, without waiting for the answer."""

    @abstractmethod
    def ready(self) -> tuple[bool, float]:
        """Whether the answer has still to come; if not, the time when it came."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the answer, and fill the outputs."""
