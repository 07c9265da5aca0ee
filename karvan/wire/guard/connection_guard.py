"""`ConnectionGuard`: bounds a service's connections and ends idle ones.

Three kinds of callers hold resources without using them:
- a TCP connection without a stream, or with streams that sent no first message: found among the sockets
  (`accepted_sockets.py`) and shut down after `Limits.hello_within`, sooner when there are many of them;
- a caller that said hello and makes no call: its stream ends (`ServerConnection.overdue`), and its connection
  is then one of the former;
- a caller that is connected and idle: welcome, until somebody else needs the room.
Machines that vanish without a word are noticed by TCP keep-alive, within two minutes.

When a token is checked, Flight does not say which address the stream comes from. It is one of the connections
that have not said hello, and there is mostly one alone.
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

_EVERY = 1.0  # seconds between two looks at the connections
_FEW_DESCRIPTORS = 0.2  # share that is left, below which connections without hello end sooner
_FRESH = 0.1  # seconds for which a look at the sockets is good enough to name a refused caller
WRONG_TOKEN = "expected the job's token, got none or another"


class GuardedConnection(Protocol):
    """A connection that can be ended to make room."""

    @property
    def host(self) -> str:
        """Of the caller."""

    @property
    def unused(self) -> bool:
        """Whether it has not made a call."""

    def idle(self, now: float) -> float:
        """Seconds without a call; 0 while one is being done."""

    def end(self) -> None:
        """Let its stream end; does not wait."""


class ConnectionGuard:
    """The connections of one service."""

    def __init__(self, name: str, sessions: Sessions, limits: Limits) -> None:
        self.limits = limits
        self.refusals = RefusalLog(name)
        self._name = name
        self._sessions = sessions
        self._lock = threading.Lock()
        self._open: set[GuardedConnection] = set()
        self._introduced: Counter[str] = Counter()  # streams of answers, by the caller's address
        self._streams: Counter[str] = Counter()  # all streams that Flight has handed over
        self._waiting = 0  # streams that it has not
        self._unknown: dict[str, float] = {}  # addresses without a hello → since when
        self._looked = 0.0
        self._crowded = clock.now()  # since when too many streams wait for their first message
        self._stopped = threading.Event()
        self._sockets: AcceptedSockets | None = None

    def start(self, port: int) -> None:
        """Look after the connections of that port, until `close`."""
        self._sockets = AcceptedSockets(port)
        threading.Thread(target=self._run, name=f"karvan-guard {self._name}", daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        if self._sockets is not None:
            self._sockets.close()
        self.refusals.flush(all_counts=True)

    def end_all(self) -> None:
        """Hang up on everybody."""
        if self._sockets is not None:
            self._sockets.shut({one.address for one in self._sockets.look()})

    def stream_opened(self) -> None:
        """A stream with the right token; a BusyError if too many wait for their first message."""
        with self._lock:
            if self._waiting >= self.limits.waiting_streams:
                raise BusyError(
                    f"expected up to {self.limits.waiting_streams} streams without a message, got more"
                )
            self._waiting += 1

    def stream_handed_over(self) -> None:
        """It has sent something, or has ended without."""
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
    def introduced(self, address: str) -> Iterator[None]:
        """A stream of answers: as long as it lasts, its connection is not ended as a stranger's."""
        with self._lock:
            self._introduced[address] += 1
            self._unknown.pop(address, None)
        try:
            yield
        finally:
            self._less(self._introduced, address)

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
        """Somebody showed a wrong token, or none."""
        if clock.now() - self._looked > _FRESH or not self._unknown:
            self._look()
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
        """End the connection that was idle for longest; those that never made a call come first."""
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
                self._look()
                self._end_strangers()
                self._sessions.forget()
                self.refusals.flush()
            except Exception:  # it must not end: nobody else looks after the connections
                _log.exception("%s could not look after its connections", self._name)

    def _look(self) -> None:
        """Which connections have not said hello."""
        assert self._sockets is not None
        found = self._sockets.look()
        now = self._looked = clock.now()
        with self._lock:
            self._unknown = {
                one.address: self._unknown.get(one.address, now)
                for one in found
                if one.address not in self._introduced
            }

    def _end_strangers(self) -> None:
        """Shut connections that have not said hello in time."""
        assert self._sockets is not None
        now, few = clock.now(), descriptors_left() < _FEW_DESCRIPTORS
        woke = clock.woke  # what was said during a pause is read after it
        with self._lock:
            pressed = few or len(self._unknown) + self._waiting >= self.limits.pressure
            limit = self.limits.hello_within_pressed if pressed else self.limits.hello_within
            late = {address for address, since in self._unknown.items() if now - max(since, woke) > limit}
            if self._waiting < self.limits.pressure:
                self._crowded = now
            elif not late and now - self._crowded > self.limits.hello_within:
                # They belong to connections that have said hello, of which nobody can tell which ones. All
                # callers come back by themselves.
                late = set(self._introduced)
                self._crowded = now
        for address in late:
            self.refusals.add(host_of(address), f"expected hello within {limit:g} s, got none", address)
        if late:
            self._sockets.shut(late)
