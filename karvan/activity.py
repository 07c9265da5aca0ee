"""What this process is doing, for its heartbeats: progress, and whom it waits for.

A process whose heartbeat thread lives may still be stuck: its main thread blocks in a callback, or its data
source hangs. So heartbeats carry an `ActivityReport`, from which the launcher finds out who holds up a job
(`karvan.launch.supervision.stalls`):

- *progress*: a counter of anything that got done: batches, steps, calls answered, parts of checkpoints.
- *task*: what a trainer has been asked to do, such as "fit". Outside of tasks a program runs its user's own
  code, and nobody expects progress.
- *waits*: for which processes its threads wait, and for how long: "loader-0", "parameter-server-1", or
  "trainers" for any of them.

`advance` is an addition; when that was, in seconds, is found out by the heartbeat thread, once a second.
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
from types import TracebackType
from typing import Any

from karvan.clock import clock

TRAINERS = "trainers"
MOST_WAITS = 64  # in a report
_STDERR = 2


@dataclass(frozen=True)
class ActivityReport:
    """What a heartbeat says of a process; seconds are those of its own clock.

    idle: seconds without progress. waits: for whom, and for how many seconds. dumps: whether it writes the
    stacks of its threads to stderr when it gets SIGQUIT.
    """

    progress: int = 0
    idle: float = 0.0
    task: str = ""
    waits: Mapping[str, float] = field(default_factory=dict)
    dumps: bool = False

    def as_head(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)


class Activity:
    """The activity of one process; all threads tell theirs."""

    def __init__(self) -> None:
        self._count = 0
        self._known = (0, clock.now())  # the count at the last report, and when it had changed
        self._lock = threading.Lock()
        self._tasks: list[str] = []
        self._waits: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count()

    def advance(self) -> None:
        """Something got done."""
        self._count += 1  # threads that add at the same time may count one; that it changes is what matters

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """Inside of it progress is expected; only trainers have tasks."""
        self.advance()
        self._tasks.append(name)
        try:
            yield
        finally:
            self._tasks.pop()
            self.advance()

    def waiting(self, name: str) -> Waiting:
        """Inside of it the calling thread waits for another process of the job, or for `TRAINERS`."""
        return Waiting(self._waits, next(self._numbers), name)

    def wait_for(self, changed: threading.Condition, name: str, reason: Callable[[], object]) -> None:
        """`changed.wait_for(reason)`, which is another process's business."""
        with self.waiting(name):
            changed.wait_for(reason)

    def report(self, dumps: bool = False) -> ActivityReport:
        """For a heartbeat."""
        waits: dict[str, float] = {}
        for name, since in list(self._waits.values()):
            waits[name] = max(waits.get(name, 0.0), round(clock.silence(since), 3))
        with self._lock:
            if self._count != self._known[0]:
                self._known = (self._count, clock.now())
            idle = max(0.0, round(clock.silence(self._known[1]), 3))
        longest = sorted(waits.items(), key=lambda each: -each[1])[:MOST_WAITS]
        return ActivityReport(self._count, idle, next(iter(self._tasks), ""), dict(longest), dumps)


class Waiting:
    """See `Activity.waiting`."""

    __slots__ = ("_key", "_name", "_waits")

    def __init__(self, waits: dict[int, tuple[str, float]], key: int, name: str) -> None:
        self._waits = waits
        self._key = key
        self._name = name

    def __enter__(self) -> None:
        self._waits[self._key] = (self._name, clock.now())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._waits[self._key]


activity = Activity()
os.register_at_fork(after_in_child=activity._waits.clear)  # a fork has none of the threads


def dump_stacks_on_signal() -> bool:
    """Have SIGQUIT write the stacks of all threads to stderr, even if the interpreter hangs; whether it does.

    A handler that the program has set itself stays. A shell has its background jobs ignore the signal.
    """
    if signal.getsignal(signal.SIGQUIT) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        return False
    with suppress(RuntimeError, OSError, ValueError):
        faulthandler.register(signal.SIGQUIT, _STDERR, all_threads=True, chain=False)
        return True
    return False
