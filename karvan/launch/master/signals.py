"""The signals of a master: kept from its first moment on, for the supervisor that it has later.

The keeper starts a master with these signals blocked, so none is lost while Python starts.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Protocol

_STOPS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


class Stoppable(Protocol):
    """A supervisor."""

    def interrupt(self, number: int) -> None:
        """Stop the job, because of this signal."""

    def suspend(self) -> None:
        """Suspend the job."""


class MasterSignals:
    """Passes SIGINT, SIGTERM, SIGHUP and SIGTSTP on, those before `pass_to` as well."""

    def __init__(self) -> None:
        self._to: Stoppable | None = None
        self._early: list[int] = []
        for number in (*_STOPS, signal.SIGTSTP):
            signal.signal(number, self._take)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*_STOPS, signal.SIGTSTP])

    def pass_to(self, supervisor: Stoppable) -> None:
        """Pass signals to this supervisor from now on."""
        self._to = supervisor
        early, self._early = self._early, []
        for number in early:
            self._pass(supervisor, number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._to is None:
            self._early.append(number)
        else:
            self._pass(self._to, number)

    def _pass(self, supervisor: Stoppable, number: int) -> None:
        if number == signal.SIGTSTP:
            supervisor.suspend()
        else:
            supervisor.interrupt(_STOPS[signal.Signals(number)])
