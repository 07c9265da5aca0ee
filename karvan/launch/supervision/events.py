"""The events that the supervisor of a job waits for: processes that end, and signals.

Events are put from any thread, also by signal handlers, and taken only by the supervisor's loop. A request
to suspend (Ctrl-Z) is served here, in any state of the job: whoever waits for an event continues to wait
afterwards, for the remaining time, because `karvan.clock` does not count the pause.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from karvan.clock import clock
from karvan.launch.engines.base import Process


@dataclass(frozen=True)
class ProcessEnded:
    """A process has ended with this code, minus the signal if one killed it."""

    process: Process
    code: int


@dataclass(frozen=True)
class StopRequested:
    """The job is to stop, because of this signal."""

    signal: int


@dataclass(frozen=True)
class ScaleRequested:
    """The job is to have this many trainers."""

    trainers: int


@dataclass(frozen=True)
class _SuspendRequested:
    """The job is to be suspended."""


class EventQueue:
    """Events in the order in which they happen; `suspend` suspends the job and returns when it is resumed."""

    def __init__(self, suspend: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[ProcessEnded | StopRequested | ScaleRequested | _SuspendRequested] = (
            queue.SimpleQueue()
        )
        self._suspend = suspend

    def ended(self, process: Process, code: int) -> None:
        """A process has ended."""
        self._queue.put(ProcessEnded(process, code))

    def stop(self, number: int) -> None:
        """Request a stop, because of this signal."""
        self._queue.put(StopRequested(number))

    def scale(self, trainers: int) -> None:
        """Request another number of trainers."""
        self._queue.put(ScaleRequested(trainers))

    def suspend(self) -> None:
        """Request a pause."""
        self._queue.put(_SuspendRequested())

    def get(self, timeout: float) -> ProcessEnded | StopRequested | ScaleRequested | None:
        """The next event; None if there is none within `timeout` seconds."""
        until = clock.now() + timeout
        while True:
            left = until - clock.now()
            try:
                event = self._queue.get(timeout=max(left, 0.0))
            except queue.Empty:
                if clock.now() >= until:  # otherwise this process was stopped in the meantime
                    return None
                continue
            if not isinstance(event, _SuspendRequested):
                return event
            self._suspend()
