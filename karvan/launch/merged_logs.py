"""Merges the output of all processes: complete lines, each with the name of its process."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from karvan.launch.engines.keeper import LOG_BYTES, RoleLog

if TYPE_CHECKING:
    from rich.console import Console

LAUNCHER = "launcher"  # the name of the job's own lines, which the launcher shows
JOB = "job"  # the name of lines for programs, with the state of the job
SEPARATOR = " | "
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_TAIL = 10
_ERROR = "error: "  # the prefix of the line in which a command or program says why it ends


class Reason(NamedTuple):
    """Lines that say why a process has ended; is_error: they are exactly its error message."""

    lines: list[str]
    is_error: bool

    def __bool__(self) -> bool:
        return bool(self.lines)


class MergedLogs:
    """Writes lines to a stream, coloured on a terminal, and to a log for each process in a folder, if any.

    Thread-safe. A stream that is not read any more does not end the job.
    """

    def __init__(
        self, names: Iterable[str] = (), folder: Path | None = None, stream: TextIO | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._colours: dict[str, str] = {LAUNCHER: "bold"}
        self._tails: dict[str, deque[str]] = {}
        self._counts: dict[str, int] = {}
        self._files: dict[str, RoleLog] = {}
        self._folder = folder
        self._stream = sys.stdout if stream is None else stream
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(
                errors="replace"
            )  # a character that the locale lacks must not stop a process
        self._console = self._terminal()
        for name in names:
            self._colour(name)
        self._width = max(map(len, self._colours))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        """Write a line of the launcher itself."""
        self.write(LAUNCHER, text)

    def write(self, name: str, line: str) -> None:
        """Write a line of a process."""
        with self._lock:
            self._tails.setdefault(name, deque(maxlen=_TAIL)).append(line)
            self._counts[name] = self._counts.get(name, 0) + 1
            if self._folder is not None:
                try:
                    self._file(self._folder, name).append(f"{line}\n".encode(errors="replace"))
                except OSError as error:  # a full disk must not block the processes that write
                    line = f"{line}\n{LAUNCHER} | logs are no longer written to {self._folder}: {error}"
                    self._folder = None
            try:
                self._show(name, line)
            except OSError:
                self._discard_stream()

    def announce(self, state: Mapping[str, Any]) -> None:
        """Write a line for programs to the stream alone: what the state of the job is."""
        with self._lock, suppress(OSError):  # the next line discards a stream that is not read any more
            self._stream.write(f"{JOB}{SEPARATOR}{json.dumps(state)}\n")
            self._stream.flush()

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """While inside, warnings that Karvan logs in this process become lines of the launcher."""
        handler, logger = _Handler(self), logging.getLogger("karvan")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def lines(self, name: str) -> int:
        """How many lines a process has written."""
        with self._lock:
            return self._counts.get(name, 0)

    def begin(self, name: str) -> None:
        """A process of that name is started: drop the last lines of the one before."""
        with self._lock:
            self._tails.pop(name, None)

    def tail(self, name: str) -> list[str]:
        """The last lines of a process."""
        with self._lock:
            return list(self._tails.get(name, ()))

    def reason(self, name: str) -> Reason:
        """Why a process has ended: its `error: …` if it has one, otherwise its last lines."""
        lines = self.tail(name)
        numbers = [number for number, line in enumerate(lines) if line.startswith(_ERROR)]
        return Reason(lines[numbers[-1] :], True) if numbers else Reason(lines, False)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._folder = None
            for file in self._files.values():
                file.close()

    def _show(self, name: str, line: str) -> None:
        if self._console is None:
            self._stream.write(f"{name}{SEPARATOR}{line}\n")
            self._stream.flush()
        else:
            from rich.text import Text

            prefix = (f"{name:<{self._width}} │ ", self._colour(name))
            self._console.print(Text.assemble(prefix, Text.from_ansi(line)), soft_wrap=True, highlight=False)

    def _terminal(self) -> Console | None:
        if not self._stream.isatty():
            return None
        from rich.console import Console

        return Console(file=self._stream)

    def _colour(self, name: str) -> str:
        return self._colours.setdefault(name, _COLOURS[(len(self._colours) - 1) % len(_COLOURS)])

    def _file(self, folder: Path, name: str) -> RoleLog:
        if name not in self._files:
            # Closed by `close`. Restarted processes continue in the same file.
            self._files[name] = RoleLog(str(folder / f"{name}.log"), LOG_BYTES, 0o666)
        return self._files[name]

    def _discard_stream(self) -> None:
        # Python flushes the buffer at exit, which would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class _Handler(logging.Handler):
    """Writes warnings as lines of the launcher."""

    def __init__(self, logs: MergedLogs) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self._logs.say(line)
