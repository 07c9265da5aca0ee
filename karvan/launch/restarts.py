"""How often and when processes are restarted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from karvan.clock import clock
from karvan.errors import OK, TEMPORARY, retry_delay
from karvan.job.checkpoint_url import url_of
from karvan.launch.processes import ManagedProcess

_LONGEST_DELAY = 30.0


@dataclass
class RestartBudget:
    """Up to `most` restarts within `window` seconds, each after a longer delay than the one before."""

    most: int
    window: float
    backoff: float
    _restarts: deque[float] = field(default_factory=deque, init=False)

    def take(self) -> bool:
        """Count one more restart; whether it is allowed."""
        now = clock.now()
        while self._restarts and self._restarts[0] < now - self.window:
            self._restarts.popleft()
        if len(self._restarts) >= self.most:
            return False
        self._restarts.append(now)
        return True

    def due(self) -> float:
        """When the restart is due; delays are random, so that not all restart at once."""
        return clock.now() + retry_delay(self.backoff, max(0, len(self._restarts) - 1), _LONGEST_DELAY)

    def times(self) -> list[float]:
        """When restarts were counted, by the wall clock in whole seconds, for the next master."""
        return [round(time.time() - (clock.now() - restart)) for restart in self._restarts]

    def restore(self, times: Iterable[float]) -> None:
        """Count the restarts of the last master."""
        self._restarts = deque(clock.now() - max(0.0, time.time() - restart) for restart in times)

    def __str__(self) -> str:
        return f"{self.most} restarts within {self.window:g} seconds"


# Detects trainers and servers that fail again and again from the same checkpoint.
#
# Only failures of the program count. An end by a signal, or with code 75 (the environment has failed: a disk
# is full, data or a server is unavailable, another rank was lost), says nothing about it; `max_restarts`
# bounds those.


_MOST = 3  # failures from the same checkpoint


class CrashLoopDetector:
    """Counts failures since the newest checkpoint in a folder, if there is one."""

    def __init__(self, checkpoints: Path | None) -> None:
        self._checkpoints = checkpoints
        self._newest = ""
        self._seen = False  # whether there has been a checkpoint
        self._failures = 0

    def failed(self) -> bool:
        """A trainer or a server has failed by itself; whether that was once too many."""
        newest = self._find_newest()
        self._failures = self._failures + 1 if newest == self._newest else 1
        self._newest = newest
        return self._failures >= _MOST

    def forget(self) -> None:
        """Reset the count: a process was killed, which may have caused the failures before."""
        self._failures = 0

    def state(self) -> list[str | bool | int]:
        """What was counted, for the next master."""
        return [self._newest, self._seen, self._failures]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue the count of the last master."""
        if state:
            self._newest, self._seen, self._failures = state

    @property
    def next_start(self) -> str:
        """Where trainers that are started now continue, for messages."""
        if self._checkpoints is None:
            return "continue from the newest checkpoint if they have one"
        if newest := self._find_newest():
            self._seen = True
            return f"go back to the newest checkpoint, {newest}"
        if self._seen:
            return "continue once the checkpoint folder, which had checkpoints before, is back"
        return "start from the beginning, because there is no checkpoint yet"

    def _find_newest(self) -> str:
        folder = self._checkpoints
        if folder is None:
            return ""
        if url_of(folder) is None:
            return max((path.name for path in folder.glob("step-*")), default="")
        from karvan.checkpoint import CheckpointError  # imports torch
        from karvan.checkpoint.survey import step_folders

        try:
            return max((path.name for path in step_folders(folder)), default="")
        except CheckpointError:  # an outage, of which trainers have their own errors
            return ""


# Decides which of several trainers that end at about the same time is the cause.
#
# When one trainer fails, the others lose it and end with code 75, temporary, often before the one that
# failed has written its last line and ended itself. So after a trainer has ended with 75, while others still
# run, the launcher waits a moment for them to end: a more specific code (a failure of the program, wrong
# usage, damaged data, a signal) is the cause, and otherwise the first one is.


_MOMENT = 3.0  # seconds

End = tuple[ManagedProcess, int]


class Verdict:
    """Holds back the end of a trainer until it is known whether it is the cause."""

    def __init__(self) -> None:
        self._held: End | None = None
        self.due: float | None = None  # when the end that is held back becomes the cause

    def judge(self, member: ManagedProcess, code: int, others_run: bool) -> End | None:
        """A trainer has ended; returns the cause, if it is known now."""
        if code == OK:
            return member, code
        if code != TEMPORARY:
            self.clear()
            return member, code
        if self._held is None:
            self._held, self.due = (member, code), clock.now() + _MOMENT
        return None if others_run else self._take()

    def overdue(self) -> End | None:
        """The end that was held back, once it is due."""
        return self._take() if self.due is not None and clock.now() >= self.due else None

    def clear(self) -> None:
        """Drop the end that is held back: the cause is known."""
        self._held = self.due = None

    def _take(self) -> End | None:
        hold = self._held
        self.clear()
        return hold
