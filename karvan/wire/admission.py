"""`Admission`: how much of a service its callers may use, and a log of those that it refuses.

A caller's connection has two threads at a service. `Limits` are far above what a job needs (sixty-four
trainers with four connections each have 256) and far below what overloads a machine. At a limit no caller is
refused permanently: the connection that was idle for longest is ended first, and its caller reconnects by
itself at its next call; if none is idle, the new caller gets a `BusyError`, and tries again until its
deadline. Callers without the token, and without a certificate, do not come so far.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from karvan.clock import clock
from karvan.wire.errors import BusyError

_log = logging.getLogger("karvan.wire")

_LINES = 20  # of the log a minute, about refused callers
_MINUTE = 60.0


@dataclass(frozen=True)
class Limits:
    """What a `Server` allows. Times are seconds."""

    connections: int = 2048
    streams: int = 5120  # with those that are just beginning
    hello_within: float = 10.0  # a connection without its second stream is ended
    first_call_within: float = 180.0  # a first call may be large and the network slow
    least_idle: float = 5.0  # a connection that was used within this time is not ended to make room
    sessions: int = 65536


class AdmittedConnection(Protocol):
    """A connection that can be ended to make room."""

    @property
    def unused(self) -> bool:
        """Whether it has not made a call."""

    def idle(self, now: float) -> float:
        """Seconds without a call; 0 while one is running."""

    def end(self) -> None:
        """End its stream, without waiting."""


class Admission:
    """The callers of one service."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.limits = limits
        self._name = name
        self._lock = threading.Lock()
        self._open: set[AdmittedConnection] = set()
        self._streams = 0
        self._refusals = 0  # in this minute
        self._minute = clock.now()

    def stream_opened(self) -> None:
        """Count a stream with the right token; a BusyError if there are too many."""
        with self._lock:
            if self._streams >= self.limits.streams:
                raise BusyError(f"expected up to {self.limits.streams} streams, got one more")
            self._streams += 1

    def stream_ended(self) -> None:
        """It has ended."""
        with self._lock:
            self._streams -= 1

    @contextmanager
    def admitted(self, connection: AdmittedConnection) -> Iterator[None]:
        """Room for a caller's connection, for as long as it lasts; a BusyError if there is none."""
        with self._lock:
            if len(self._open) >= self.limits.connections:
                self._end_idle()
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def refused(self, caller: str, reason: str) -> None:
        """Log a refusal, unless there were many in this minute; then their number is logged after it."""
        with self._lock:
            more = 0
            if clock.now() - self._minute >= _MINUTE:
                more, self._refusals = self._refusals - _LINES, 0
                self._minute = clock.now()
            self._refusals += 1
            is_shown = self._refusals <= _LINES
        if more > 0:
            _log.warning("%s refused %d more callers", self._name, more)
        if is_shown:
            _log.warning("%s refused %s: %s", self._name, caller, reason)

    def _end_idle(self) -> None:
        """End the connection that was idle for longest; those that never made a call first."""
        now = clock.now()
        ready = [one for one in self._open if one.idle(now) >= self.limits.least_idle]
        longest = max(ready, key=lambda one: (one.unused, one.idle(now)), default=None)
        if longest is None:
            most = self.limits.connections
            raise BusyError(f"expected up to {most} connections, got one more; all are in use")
        self._open.discard(longest)
        longest.end()
