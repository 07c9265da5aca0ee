"""Decides which of several trainers that end at about the same time is the cause.

When one trainer fails, the others lose it and end with code 75, temporary, often before the one that failed
has written its last line and ended itself. So after a trainer has ended with 75, while others still run, the
launcher waits a moment for them to end: a more specific code (a failure of the program, wrong usage, damaged
data, a signal) is the cause, and otherwise the first one is.
"""

from __future__ import annotations

from karvan.clock import clock
from karvan.exit_codes import OK, TEMPORARY
from karvan.launch.supervision.processes import ManagedProcess

_MOMENT = 3.0  # seconds

End = tuple[ManagedProcess, int]


class Verdict:
    """Holds back the end of a trainer until it is known whether it is the cause."""

    def __init__(self, moment: float = _MOMENT) -> None:
        self._moment = moment
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
            self._held, self.due = (member, code), clock.now() + self._moment
        return None if others_run else self._take()

    def overdue(self) -> End | None:
        """The end that was held back, once it is due."""
        return self._take() if self.due is not None and clock.now() >= self.due else None

    def clear(self) -> None:
        """Drop the end that is held back: the cause is known."""
        self._held = self.due = None

    def _take(self) -> End | None:
        held = self._held
        self.clear()
        return held
