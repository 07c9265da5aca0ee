"""`ServerConnection`: a caller's two streams, as the service sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from karvan.clock import clock
from karvan.wire.errors import WireError
from karvan.wire.guard.accepted_sockets import host_of, peer_address
from karvan.wire.guard.limits import Limits
from karvan.wire.message import LARGE, Message, Packed, pack, write
from karvan.wire.service import Caller
from karvan.wire.session import USUAL_DEADLINE, Session

BUSY_EVERY = 2.0  # seconds between heartbeats while a call takes long, or less for impatient callers


class ServerConnection:
    """Where a caller's answers go, and what is known of its use."""

    def __init__(self, caller: Caller, hello: Mapping[str, Any], writer: Any) -> None:
        self.caller = caller
        self._hello = hello  # with what the wire itself has put there
        self.host = host_of(peer_address(caller.address))
        self.session = Session()  # replaced by the caller's own once it is admitted
        self.ended = threading.Event()
        self.taken = False  # whether its calls have a thread
        self._writer: Any = writer
        self._lock = threading.Lock()
        self._since = 0.0  # when the call that is being done was begun
        self._opened = self._used = clock.now()
        self._calls = 0

    @property
    def patience(self) -> float:
        """Seconds of silence after which the caller would think that the connection is broken."""
        return self._number("patience", 4 * BUSY_EVERY)

    @property
    def deadline(self) -> float:
        """Seconds for which the caller sends a call again."""
        return self._number("deadline", USUAL_DEADLINE)

    @property
    def unused(self) -> bool:
        """Whether it has not made a call."""
        return not self._calls

    def idle(self, now: float) -> float:
        """Seconds without a call; 0 while one is being done."""
        return 0.0 if self._since else now - self._used

    def overdue(self, now: float, limits: Limits) -> str:
        """What the caller should have done by now, if anything."""
        age = now - self._opened
        if not self.taken and age > limits.hello_within:
            return f"expected a stream of calls within {limits.hello_within:g} s, got none"
        if not self._calls and age > limits.first_call_within:
            return f"expected a call within {limits.first_call_within:g} s, got none"
        return ""

    def write(self, packed: Packed, **numbers: int) -> None:
        """Send an answer."""
        with self._lock:
            if self._writer is None:
                raise WireError("it hung up")
            size = sum(array.nbytes for array in packed.arrays)
            if size > LARGE:  # so that the caller knows why it has to wait
                write(self._writer, pack(Message({"busy": True})), bytes=size)
            write(self._writer, packed, **numbers)

    def end(self) -> None:
        """Let the stream of answers end, and with it the connection."""
        self.ended.set()

    def close(self) -> None:
        """No more writes: the stream is about to end."""
        with self._lock:
            self._writer = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a call is being done."""
        self._calls += 1
        self._since = clock.now()
        try:
            yield
        finally:
            self._used = clock.now()
            self._since = 0.0

    def say_if_busy(self, every: float) -> None:
        """Tell the caller that its call takes long and is not lost."""
        since = self._since
        if since and clock.now() - since >= every / 2 and self._lock.acquire(blocking=False):
            try:
                write(self._writer, pack(Message({"busy": True})))
            finally:
                self._lock.release()

    def _number(self, name: str, usual: float) -> float:
        given: Any = self._hello.get(name)
        return float(given) if type(given) in (int, float) and 0 < given < 1e9 else usual
