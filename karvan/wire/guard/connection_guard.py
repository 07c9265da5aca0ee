"""`ConnectionGuard`: bounds a service's connections and ends idle ones.

Three kinds of callers hold resources without using them:
- a TCP connection without a stream, or with streams that sent no first message: found among the sockets
  (`accepted_sockets.py`) and shut down after `Limits.hello_within`, sooner when there are many of them;
- a caller that sent a hello and makes no call: its stream ends (`ServerConnection.overdue`), and its
  connection is then one of the first kind;
- a caller that is connected and idle: allowed, until another caller needs the room.
Machines that vanish are detected by TCP keep-alive, within two minutes.

When a token is checked, Flight does not say which address the stream comes from. It is one of the connections
that have not sent a hello, and there is rarely more than one.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from karvan.clock import clock
from karvan.wire.errors import BusyError, RefusedError
from karvan.wire.guard.accepted_sockets import AcceptedSockets, descriptors_left, host_of
from karvan.wire.guard.limits import Limits
from karvan.wire.guard.refusal_log import RefusalLog
from karvan.wire.session import Sessions

_log = logging.getLogger("karvan.wire")

_EVERY = 1.0  # seconds between two scans of the connections
_FEW_DESCRIPTORS = 0.2  # free fraction below which connections without hello are ended sooner
_FRESH = 0.1  # seconds for which a scan of the sockets is recent enough to name a refused caller
WRONG_TOKEN = "expected the job's token, got none or another"


class GuardedConnection(Protocol):
    """A connection that can be ended to make room."""

    @property
    def host(self) -> str:
        """The host of the caller."""

    @property
    def unused(self) -> bool:
        """Whether it has not made a call."""

    def idle(self, now: float) -> float:
        """Seconds without a call; 0 while one is running."""

    def end(self) -> None:
        """End its stream, without waiting."""


class ConnectionGuard:
    """The connections of one service."""

    def __init__(self, name: str, sessions: Sessions, limits: Limits) -> None:
        self.limits = limits
        self.refusals = RefusalLog(name)
        self._name = name
        self._sessions = sessions
        self._lock = threading.Lock()
        self._open: set[GuardedConnection] = set()
        self._identified: Counter[str] = Counter()  # streams of answers, by the caller's address
        self._streams: Counter[str] = Counter()  # all streams that Flight has handed over
        self._waiting = 0  # streams that Flight has not handed over yet
        self._unknown: dict[str, float] = {}  # addresses without a hello → since when
        self._scanned = 0.0
        self._crowded = clock.now()  # since when too many streams wait for their first message
        self._stopped = threading.Event()
        self._sockets: AcceptedSockets | None = None

    def start(self, port: int) -> None:
        """Guard the connections of that port, until `close`."""
        self._sockets = AcceptedSockets(port)
        threading.Thread(target=self._run, name=f"karvan-guard {self._name}", daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        if self._sockets is not None:
            self._sockets.close()
        self.refusals.flush(all_counts=True)

    def end_all(self) -> None:
        """End all connections."""
        if self._sockets is not None:
            self._sockets.shut({one.address for one in self._sockets.look()})

    def stream_opened(self) -> None:
        """Count a stream with the right token; a BusyError if too many wait for their first message."""
        with self._lock:
            if self._waiting >= self.limits.waiting_streams:
                raise BusyError(
                    f"expected up to {self.limits.waiting_streams} streams without a message, got more"
                )
            self._waiting += 1

    def stream_handed_over(self) -> None:
        """It has sent its first message, or has ended without one."""
        with self._lock:
            self._waiting -= 1

    @contextmanager
    def stream(self, address: str) -> Iterator[None]:
        """A stream that Flight has handed over, for as long as it lasts."""
        with self._lock:
            if self._streams[address] >= self.limits.streams_per_connection:
                most = self.limits.streams_per_connection
                raise RefusedError(f"expected up to {most} streams of a connection, got one more.")
            self._streams[address] += 1
        try:
            yield
        finally:
            self._less(self._streams, address)

    @contextmanager
    def identified(self, address: str) -> Iterator[None]:
        """A stream of answers: as long as it lasts, its connection is not ended as one without a hello."""
        with self._lock:
            self._identified[address] += 1
            self._unknown.pop(address, None)
        try:
            yield
        finally:
            self._less(self._identified, address)

    @contextmanager
    def admitted(self, connection: GuardedConnection) -> Iterator[None]:
        """Room for a caller's connection, for as long as it lasts; a BusyError if there is none."""
        with self._lock:
            of_host = [one for one in self._open if one.host == connection.host]
            if len(of_host) >= self.limits.connections_per_host:
                self._end_idle(of_host, f" of {connection.host}")
            elif len(self._open) >= self.limits.connections:
                self._end_idle(list(self._open), "")
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def token_refused(self) -> None:
        """A caller sent a wrong token, or none."""
        if clock.now() - self._scanned > _FRESH or not self._unknown:
            self._scan()
        with self._lock:
            addresses = sorted(self._unknown)
        hosts = sorted({host_of(address) for address in addresses})
        if len(hosts) == 1:
            address = addresses[0] if len(addresses) == 1 else ""
            self.refusals.add(hosts[0], WRONG_TOKEN, address)
        elif hosts:
            shown = ", ".join(hosts[:4]) + (", …" if len(hosts) > 4 else "")
            self.refusals.add(f"one of {shown}", WRONG_TOKEN)
        else:
            self.refusals.add("a caller at an unknown address", WRONG_TOKEN)

    def _end_idle(self, among: list[GuardedConnection], whose: str) -> None:
        """End the connection that was idle for longest; those that never made a call first."""
        now = clock.now()
        ready = [one for one in among if one.idle(now) >= self.limits.least_idle]
        longest = max(ready, key=lambda one: (one.unused, one.idle(now)), default=None)
        if longest is None:
            raise BusyError(f"expected up to {len(among)} connections{whose}, got one more; all are in use")
        self._open.discard(longest)
        longest.end()

    def _less(self, counter: Counter[str], address: str) -> None:
        with self._lock:
            counter[address] -= 1
            if counter[address] <= 0:
                del counter[address]

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY):
            try:
                self._scan()
                self._end_silent()
                self._sessions.forget()
                self.refusals.flush()
            except Exception:  # the thread must not end: nothing else guards the connections
                _log.exception("%s could not check its connections", self._name)

    def _scan(self) -> None:
        """Find the connections that have not sent a hello."""
        assert self._sockets is not None
        found = self._sockets.look()
        now = self._scanned = clock.now()
        with self._lock:
            self._unknown = {
                one.address: self._unknown.get(one.address, now)
                for one in found
                if one.address not in self._identified
            }

    def _end_silent(self) -> None:
        """Shut down connections that have not sent a hello in time."""
        assert self._sockets is not None
        now, few = clock.now(), descriptors_left() < _FEW_DESCRIPTORS
        woke = clock.woke  # a hello that came during a pause is read after it
        with self._lock:
            pressed = few or len(self._unknown) + self._waiting >= self.limits.pressure
            limit = self.limits.hello_within_pressed if pressed else self.limits.hello_within
            late = {address for address, since in self._unknown.items() if now - max(since, woke) > limit}
            if self._waiting < self.limits.pressure:
                self._crowded = now
            elif not late and now - self._crowded > self.limits.hello_within:
                # They belong to connections that have sent a hello, but to which ones is unknown. All callers
                # reconnect by themselves.
                late = set(self._identified)
                self._crowded = now
        for address in late:
            self.refusals.add(host_of(address), f"expected hello within {limit:g} s, got none", address)
        if late:
            self._sockets.shut(late)
