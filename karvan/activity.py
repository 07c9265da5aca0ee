"""What this process is doing, for its heartbeats: progress, and which processes it waits for.

A process whose heartbeat thread runs may still be stuck: its main thread blocks in a callback, or its data
source hangs. So heartbeats carry an `ActivityReport`, from which the launcher finds the process that blocks
a job (`karvan.launch.health`):

- *progress*: a counter of completed work: batches, steps, calls answered, parts of checkpoints.
- *task*: what a trainer is running, such as "fit". Outside of tasks a program runs the user's own code, and
  no progress is expected.
- *waits*: for which processes its threads wait, and for how long: "loader-0", "parameter-server-1", or
  "trainers" for any of them.

`advance` only increments the counter; the heartbeat thread notices the change and its time, once a second.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from karvan.clock import clock

TRAINERS = "trainers"
MOST_WAITS = 64  # in a report
_STDERR = 2


@dataclass(frozen=True)
class ActivityReport:
    """What a heartbeat reports about a process; seconds are those of its own clock.

    idle: seconds without progress. waits: process name → seconds. dumps: whether the process writes the
    stacks of its threads to stderr on SIGQUIT.
    """

    progress: int = 0
    idle: float = 0.0
    task: str = ""
    waits: Mapping[str, float] = field(default_factory=dict)
    dumps: bool = False

    def as_head(self) -> dict[str, Any]:
        """The report as the head of a message."""
        return asdict(self)


class Activity:
    """The activity of one process; any thread may report."""

    def __init__(self) -> None:
        self._count = 0
        self._last_change = (0, clock.now())  # the count at the last report, and when it had changed
        self._lock = threading.Lock()
        self._tasks: list[str] = []
        self._waits: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count()

    def advance(self) -> None:
        """Count a unit of completed work."""
        self._count += 1  # concurrent increments may be lost: it only matters that the count changes

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """While a trainer runs the task: progress is expected. Only trainers have tasks."""
        self.advance()
        self._tasks.append(name)
        try:
            yield
        finally:
            self._tasks.pop()
            self.advance()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """While the calling thread waits for another process of the job, or for `TRAINERS`."""
        number = next(self._numbers)
        self._waits[number] = (name, clock.now())
        try:
            yield
        finally:
            self._waits.pop(number, None)  # a fork has cleared them

    def wait_for(self, changed: threading.Condition, name: str, reason: Callable[[], object]) -> None:
        """`changed.wait_for(reason)`, where the change depends on another process."""
        with self.waiting(name):
            changed.wait_for(reason)

    def report(self, dumps: bool = False) -> ActivityReport:
        """The report for a heartbeat."""
        waits: dict[str, float] = {}
        for name, since in list(self._waits.values()):
            waits[name] = max(waits.get(name, 0.0), round(clock.silence(since), 3))
        with self._lock:
            if self._count != self._last_change[0]:
                self._last_change = (self._count, clock.now())
            idle = max(0.0, round(clock.silence(self._last_change[1]), 3))
        longest = sorted(waits.items(), key=lambda wait: -wait[1])[:MOST_WAITS]
        return ActivityReport(self._count, idle, next(iter(self._tasks), ""), dict(longest), dumps)


activity = Activity()
os.register_at_fork(after_in_child=activity._waits.clear)  # a forked child has none of the threads


def dump_stacks_on_signal() -> bool:
    """Make SIGQUIT write the stacks of all threads to stderr, even if the interpreter hangs.

    Returns whether it does. A handler that the program has installed stays in place; an ignored signal is
    taken over, because shells start background jobs that way.
    """
    if signal.getsignal(signal.SIGQUIT) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        return False
    with suppress(RuntimeError, OSError, ValueError):
        faulthandler.register(signal.SIGQUIT, _STDERR, all_threads=True, chain=False)
        return True
    return False
