"""`OutputBuffer`: the lines of a process until a master has taken them.

Lines are numbered. `take(first)` waits for lines from that number on, and drops those before it: the master
has written them. A master that dies before it has said so leaves them to the next one, which gets them again.
A buffer has a name, because an actor that Ray restarts has another one, whose numbers begin again.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from dataclasses import dataclass

_MOST_BYTES = 16 << 20  # that wait for a master
_BATCH = 64 << 10  # bytes; Ray passes results of this size on without its object store

_GATHER = 0.02  # seconds; a call for each line would take longer than the lines


@dataclass(frozen=True)
class Batch:
    """Some lines, the number of the line after them, and the exit code once there are no more."""

    lines: list[str]
    following: int
    code: int | None
    buffer: str = ""


class OutputBuffer:
    """Lines of a process. If they are not taken and too many, `append` waits: further lines are in the log of
    the process until then, in two files of limited size.
    """

    def __init__(self, *, most: int = _MOST_BYTES) -> None:
        self.name = secrets.token_hex(4)
        self._most = most
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._first = 0  # the number of the first line
        self._bytes = 0
        self._code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._code is not None

    def append(self, line: str) -> None:
        """Add a line."""
        with self._changed:
            while self._bytes > self._most:
                self._changed.wait()
            self._lines.append(line)
            self._bytes += len(line) + 1
            if len(self._lines) == 1 or self._bytes > _BATCH:
                self._changed.notify_all()

    def end(self, code: int) -> None:
        """The process has ended, after its last line."""
        with self._changed:
            self._code = code
            self._changed.notify_all()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the process has ended, at most some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._code is not None, seconds)

    def take(self, first: int, seconds: float, buffer: str = "") -> Batch:
        """Lines from number `first` of a buffer on, or none if there are none within some seconds."""
        if buffer and buffer != self.name:
            first = 0
        with self._changed:
            while self._lines and self._first < first:
                self._drop()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._code is not None, seconds)
            self._changed.wait_for(lambda: self._bytes > _BATCH or self._code is not None, _GATHER)
            lines: list[str] = []
            size = 0
            for line in self._lines:
                size += len(line) + 1
                if lines and size > _BATCH:
                    break
                lines.append(line)
            following = self._first + len(lines)
            return Batch(lines, following, None if self._lines else self._code, self.name)

    def _drop(self) -> None:
        self._bytes -= len(self._lines.popleft()) + 1
        self._first += 1
