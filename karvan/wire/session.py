"""The calls of one client at a service, each executed once.

Calls are numbered. A connection may break between a call and its answer; the caller then repeats the calls
that have not been answered, and gets the stored answers of those that were executed. Answers are stored until
the caller confirms that it has received them.

A caller that is killed does not say good-bye, so sessions without a connection accumulate. How long one must
be retained follows from what the caller can still ask: it repeats a call until the call's deadline and no
longer, so a session is needed for that many seconds after its connection broke (callers say how many). A
session in which no call was ever started has no answers to repeat, and is removed with its connection. One
that has not reached its deadline is never removed to make room; a new caller is then refused as "busy", and
tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from karvan.clock import clock
from karvan.wire.errors import BusyError, RefusedError
from karvan.wire.message import Packed

USUAL_DEADLINE = 120.0  # seconds, of callers that do not say
LONGEST_DEADLINE = 3600.0  # the session of a caller that is disconnected for longer may be removed
_MARGIN = 10.0  # seconds, between the clocks of the two sides
_SCAN_EVERY = 1.0  # seconds, at least, between two scans of all sessions
_MOST_BYTES = 2**28  # of answers stored for disconnected callers; more of them count as pressure


class Session:
    """A service's state of one caller; connections of the same caller take turns."""

    def __init__(self, deadline: float = USUAL_DEADLINE) -> None:
        self._lock = threading.Lock()
        self._answers: dict[int, Packed] = {}
        self.deadline = deadline
        self.started = 0  # number of the last call that was started
        self.last = 0  # number of the last call that was completed
        self.connections = 0
        self.used = clock.now()

    @property
    def bytes(self) -> int:
        """The size of the stored answers."""
        return sum(array.nbytes for packed in list(self._answers.values()) for array in packed.arrays)

    def answer(self, number: int, received: int, do: Callable[[], Packed], deadline: float = 0.0) -> Packed:
        """The answer to a call; the caller has those up to `received`, and waits for `deadline` seconds."""
        with self._lock:
            self.used = clock.now()
            self.deadline = max(self.deadline, min(deadline, LONGEST_DEADLINE))
            for old in [each for each in self._answers if each <= received]:
                del self._answers[old]
            if number in self._answers:
                return self._answers[number]
            if number != self.last + 1:
                raise RefusedError(f"expected call {self.last + 1} of this caller, got {number}.")
            self.started = number
            answer = do()
            self.last = number
            self._answers[number] = answer
            return answer

    def expired(self, now: float, idle: float, pressure: bool) -> bool:
        """Whether its disconnected caller cannot ask for an answer any more, or has been idle for `idle`."""
        return now - self.used > (min(idle, self.deadline + _MARGIN) if pressure else idle)


class Sessions:
    """The sessions of all callers of a service by name; those that are disconnected for long are removed."""

    def __init__(self, most: int = 65536, idle: float = 3600.0) -> None:
        self._most = most
        self._idle = idle
        self._lock = threading.Lock()
        self._known: dict[str, Session] = {}
        self._scanned = 0.0  # when the disconnected sessions were last scanned

    @contextmanager
    def use(self, name: str, deadline: float = USUAL_DEADLINE) -> Iterator[Session]:
        """The session of that name, created if necessary, for one connection."""
        with self._lock:
            if name not in self._known:
                self._make_room()
                self._known[name] = Session()
            session = self._known[name]
            session.deadline = max(1.0, min(deadline, LONGEST_DEADLINE))
            session.connections += 1
        try:
            yield session
        finally:
            with self._lock:
                session.connections -= 1
                session.used = clock.now()
                if not (session.connections or session.started) and self._known.get(name) is session:
                    del self._known[name]

    def end(self, name: str) -> None:
        """The caller has said good-bye."""
        with self._lock:
            self._known.pop(name, None)

    def _make_room(self) -> None:
        """Remove sessions that are disconnected for too long; a BusyError if that leaves no room."""
        now = clock.now()
        if now - self._scanned > _SCAN_EVERY:
            self._scanned = now
            disconnected = [(name, one) for name, one in self._known.items() if not one.connections]
            stored = sum(one.bytes for _, one in disconnected)
            pressure = len(self._known) >= self._most // 2 or stored > _MOST_BYTES
            for name in [name for name, one in disconnected if one.expired(now, self._idle, pressure)]:
                del self._known[name]
        if len(self._known) >= self._most:
            raise BusyError(
                f"expected up to {self._most} sessions, got one more; those without a connection are removed "
                "after their deadline"
            )
