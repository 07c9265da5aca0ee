"""`ServerConnection`: a caller's two streams, as the service sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from karvan.clock import clock
from karvan.wire.admission import Limits
from karvan.wire.errors import WireError
from karvan.wire.message import LARGE, Message, Packed, pack, write
from karvan.wire.service import Caller
from karvan.wire.session import USUAL_DEADLINE, Session

BUSY_EVERY = 2.0  # seconds between heartbeats while a call takes long, or less for impatient callers


class ServerConnection:
    """A caller's stream of answers, and how its connection is used."""

    def __init__(self, caller: Caller, hello: Mapping[str, Any], writer: Any) -> None:
        self.caller = caller
        self._hello = hello  # with the fields that the wire itself has added
        self.session = Session()  # replaced by the caller's own once it is admitted
        self.ended = threading.Event()
        self.taken = False  # whether a thread reads its calls
        self._writer: Any = writer
        self._lock = threading.Lock()
        self._since = 0.0  # when the running call started; 0: none is running
        self._opened = self._used = clock.now()
        self._calls = 0

    @property
    def patience(self) -> float:
        """Seconds of silence after which the caller treats the connection as broken."""
        return self._number("patience", 4 * BUSY_EVERY)

    @property
    def deadline(self) -> float:
        """Seconds for which the caller repeats a call."""
        return self._number("deadline", USUAL_DEADLINE)

    @property
    def unused(self) -> bool:
        """Whether it has not made a call."""
        return not self._calls

    def idle(self, now: float) -> float:
        """Seconds without a call; 0 while one is running."""
        return 0.0 if self._since else now - self._used

    def overdue(self, now: float, limits: Limits) -> str:
        """What the caller should have done by now; empty if nothing is overdue."""
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
                raise WireError("the caller ended the connection")
            size = sum(array.nbytes for array in packed.arrays)
            if size > LARGE:  # announce the size, so that the caller waits long enough
                write(self._writer, pack(Message({"busy": True})), bytes=size)
            write(self._writer, packed, **numbers)

    def end(self) -> None:
        """End the stream of answers, and with it the connection."""
        self.ended.set()

    def close(self) -> None:
        """No more writes: the stream is about to end."""
        with self._lock:
            self._writer = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a call is running."""
        self._calls += 1
        self._since = clock.now()
        try:
            yield
        finally:
            self._used = clock.now()
            self._since = 0.0

    def say_if_busy(self, every: float) -> None:
        """Report to the caller that its call is still running."""
        since = self._since
        if since and clock.now() - since >= every / 2 and self._lock.acquire(blocking=False):
            try:
                write(self._writer, pack(Message({"busy": True})))
            finally:
                self._lock.release()

    def _number(self, name: str, usual: float) -> float:
        value: Any = self._hello.get(name)
        return float(value) if type(value) in (int, float) and 0 < value < 1e9 else usual
