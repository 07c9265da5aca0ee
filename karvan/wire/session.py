"""A caller's calls at a service, each done once.

Calls are numbered. A connection may break between a call and its answer; the caller then sends again what has
not been answered, and gets the answers of what was done already. Answers are kept until the caller says that
it has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from karvan.clock import clock
from karvan.wire.errors import RefusedError
from karvan.wire.message import Packed


class Session:
    """What a service knows of one caller; connections of the same caller take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[int, Packed] = {}
        self.last = 0  # number of the last call that was done
        self.connections = 0
        self.used = clock.now()

    def answer(self, number: int, received: int, do: Callable[[], Packed]) -> Packed:
        """The answer to a call; the caller has those up to number `received`."""
        with self._lock:
            self.used = clock.now()
            for old in [known for known in self._answers if known <= received]:
                del self._answers[old]
            if number in self._answers:
                return self._answers[number]
            if number != self.last + 1:
                raise RefusedError(f"expected call {self.last + 1} of this caller, got {number}.")
            made = do()
            self.last = number
            self._answers[number] = made
            return made


class Sessions:
    """All callers of a service, by the names that they chose; those that are away for long are forgotten."""

    def __init__(self, most: int = 4096, idle: float = 3600.0) -> None:
        self._most = most
        self._idle = idle
        self._lock = threading.Lock()
        self._known: dict[str, Session] = {}

    @contextmanager
    def use(self, name: str) -> Iterator[Session]:
        """The session of that name, new if it is not known, for one connection."""
        with self._lock:
            if name not in self._known:
                self._forget()
                self._known[name] = Session()
            session = self._known[name]
            session.connections += 1
        try:
            yield session
        finally:
            with self._lock:
                session.connections -= 1
                session.used = clock.now()

    def end(self, name: str) -> None:
        """The caller has said good-bye."""
        with self._lock:
            self._known.pop(name, None)

    def _forget(self) -> None:
        now = clock.now()
        for name, one in list(self._known.items()):
            if not one.connections and now - one.used > self._idle:
                del self._known[name]
        if len(self._known) >= self._most:
            raise RefusedError(f"expected up to {self._most} callers, got one more.")
