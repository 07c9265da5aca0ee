"""Follows log files that keepers write, and passes their lines on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from karvan.launch.engines.keeper import OLDER_LOGS

_LONGEST_LINE = 1 << 16  # bytes; longer lines are cut, so that no process fills the master's memory
_CHUNK = 1 << 18
_PAUSES = 0.01, 0.1  # seconds between two looks at all files: after output, and at most


class FollowedLog:
    """The lines of a log file, from a position on, each passed to `write` once.

    The position is stored in the file `shown`: another master continues there. Lines that were passed on just
    before a master died may come twice, but none is lost. Without such a file, all lines that the log still
    has are passed on, or the last ones (tail).
    """

    def __init__(
        self,
        path: Path,
        write: Callable[[str], None],
        shown: Path | None = None,
        tail: int | None = None,
    ) -> None:
        self._path = path
        older = (path.with_name(f"{path.name}.{number + 1}") for number in range(OLDER_LOGS))
        self._files = [path, *older]  # from the newest
        self._write = write
        self._lock = threading.Lock()
        self._shown = -1
        if shown is not None:
            self._shown = os.open(shown, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closed = False
        self._rest = b""
        self._file, self._offset = self._open_where_shown() if tail is None else self._open_tail(tail)

    @staticmethod
    def begin(path: Path, shown: Path) -> None:
        """Store that everything which is in the log now was shown."""
        path.touch(0o600)
        status = path.stat()
        shown.write_bytes(_packed(status.st_ino, status.st_size))

    def read(self, *, last: bool = False) -> bool:
        """Pass on what is new; whether there was anything. last: also a line without an end."""
        with self._lock:
            if self._closed:
                return False
            data = self._read_file()
            while (following := self._open_following()) is not None:
                data = self._read_file() or data  # written before the file was renamed
                os.close(self._file)
                # What is left of a line that is too long for a file belongs to its rest in the next one.
                self._file, self._offset = following, -len(self._rest)
                data = self._read_file() or data
            if last and self._rest:
                self._pass_on(self._rest)
                self._rest = b""
            if self._shown >= 0 and (data or last):
                os.pwrite(self._shown, _packed(os.fstat(self._file).st_ino, max(0, self._offset)), 0)
            return data

    def close(self) -> None:
        """Release the files."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)
                if self._shown >= 0:
                    os.close(self._shown)

    def _open_where_shown(self) -> tuple[int, int]:
        stored = os.pread(self._shown, 64, 0).split() if self._shown >= 0 else []
        inode, offset = (int(stored[0]), int(stored[1])) if len(stored) == 2 else (0, 0)
        file = self._open_newest()
        for older in self._files[1:] if inode or self._shown < 0 else []:
            if os.fstat(file).st_ino == inode:
                break
            with suppress(FileNotFoundError):
                next_older = os.open(older, os.O_RDONLY | os.O_CLOEXEC)
                os.close(file)
                file = next_older
        return file, offset if os.fstat(file).st_ino == inode else 0

    def _open_tail(self, lines: int) -> tuple[int, int]:
        """The newest file, where its last lines begin, or an older one if that does not have so many."""
        file = self._open_newest()
        offset, missing = _tail_of(file, lines)
        for path in self._files[1:]:
            if missing and path.exists():
                os.close(file)
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                offset, missing = _tail_of(file, missing)
        return file, offset

    def _open_newest(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _open_following(self) -> int | None:
        """The file after this one, if this one was renamed."""
        while place := self._place():
            for path in reversed(self._files[:place]):
                with suppress(FileNotFoundError):
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    if self._place() == place:
                        return file
                    os.close(file)  # renamed meanwhile: perhaps another one follows
                    break
            else:
                return None
        return None

    def _place(self) -> int:
        """Where this file is among all of the log; after them if it was removed."""
        inode = os.fstat(self._file).st_ino
        for place, path in enumerate(self._files):  # in the order in which files are renamed
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    return place
        return len(self._files)

    def _read_file(self) -> bool:
        match = False
        while data := os.pread(self._file, _CHUNK, self._offset + len(self._rest)):
            match = True
            *lines, rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._pass_on(line)
                self._offset += len(line) + 1
            while len(rest) >= _LONGEST_LINE:
                self._pass_on(rest[:_LONGEST_LINE])
                self._offset += _LONGEST_LINE
                rest = rest[_LONGEST_LINE:]
            self._rest = rest
        return match

    def _pass_on(self, line: bytes) -> None:
        for start in range(0, max(1, len(line)), _LONGEST_LINE):
            self._write(line[start : start + _LONGEST_LINE].decode(errors="replace").rstrip("\r\n"))


class LogFollower:
    """Reads all followed logs, in one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: set[FollowedLog] = set()
        self._started = False

    def add(self, log: FollowedLog) -> None:
        """Read this one from now on."""
        with self._lock:
            self._logs.add(log)
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="karvan-logs", daemon=True).start()

    def finish(self, log: FollowedLog) -> None:
        """Its process has ended: read the rest, and forget it."""
        with self._lock:
            self._logs.discard(log)
        log.read(last=True)
        log.close()

    def _run(self) -> None:
        first, most = _PAUSES
        pause = first
        tick = threading.Event()
        while True:
            with self._lock:
                logs = list(self._logs)
            texts = [log.read() for log in logs]
            pause = first if any(texts) else min(most, 1.5 * pause)
            tick.wait(pause)


def _tail_of(file: int, lines: int) -> tuple[int, int]:
    """Where the last lines of a file begin, and how many of them it lacks."""
    at = os.fstat(file).st_size
    ends = lines + 1  # that of the line before, too
    while at > 0 and lines > 0:
        start = max(0, at - _CHUNK)
        block = os.pread(file, at - start, start)
        place = len(block)
        while ends and (place := block.rfind(b"\n", 0, place)) >= 0:
            ends -= 1
            if not ends:
                return start + place + 1, 0
        at = start
    return at, ends - 1


def _packed(inode: int, offset: int) -> bytes:
    return b"%20d %20d\n" % (inode, offset)
