"""The output of all processes as one: whole lines, each with the name of its process."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from rich.console import Console

LAUNCHER = "launcher"
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_TAIL = 10
_ERROR = "error: "  # how commands and programs of a job begin the line that says why they end


class Reason(NamedTuple):
    """Lines that say why a process has ended; is_error: they are its error message and nothing else."""

    lines: list[str]
    is_error: bool

    def __bool__(self) -> bool:
        return bool(self.lines)


class MergedLogs:
    """Writes lines to a stream, coloured on a terminal, and to a file for each process in a folder, if any.

    Threads may call at the same time. A stream that nobody reads any more does not end the job.
    """

    def __init__(
        self, names: Iterable[str] = (), folder: Path | None = None, stream: TextIO | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._colours: dict[str, str] = {LAUNCHER: "bold"}
        self._tails: dict[str, deque[str]] = {}
        self._counts: dict[str, int] = {}
        self._files: dict[str, TextIO] = {}
        self._folder = folder
        self._stream = sys.stdout if stream is None else stream
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="replace")  # a locale without a character must not stop a process
        self._console = self._terminal()
        for name in names:
            self._colour(name)
        self._width = max(map(len, self._colours))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def tell(self, text: str) -> None:
        """Write what the launcher itself has to say."""
        self.write(LAUNCHER, text)

    def write(self, name: str, line: str) -> None:
        """Write a line of a process."""
        with self._lock:
            self._tails.setdefault(name, deque(maxlen=_TAIL)).append(line)
            self._counts[name] = self._counts.get(name, 0) + 1
            if self._folder is not None:
                try:
                    self._file(self._folder, name).write(f"{line}\n")
                except OSError as error:  # a full disk must not hold up those who write
                    line = f"{line}\n{LAUNCHER} | logs are no longer written to {self._folder}: {error}"
                    self._folder = None
            try:
                self._show(name, line)
            except OSError:
                self._leave_stream()

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Inside of it warnings of Karvan's own parts in this process are lines of the launcher."""
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
        """A process of that name is started: the last lines are its own from now on."""
        with self._lock:
            self._tails.pop(name, None)

    def tail(self, name: str) -> list[str]:
        """The last lines of a process."""
        with self._lock:
            return list(self._tails.get(name, ()))

    def reason(self, name: str) -> Reason:
        """What the last lines of a process say of its end: its `error: …` if it has one, or all of them."""
        lines = self.tail(name)
        found = [number for number, line in enumerate(lines) if line.startswith(_ERROR)]
        return Reason(lines[found[-1] :], True) if found else Reason(lines, False)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._folder = None
            for file in self._files.values():
                with suppress(OSError):  # a full disk, which was reported
                    file.close()

    def _show(self, name: str, line: str) -> None:
        if self._console is None:
            self._stream.write(f"{name} | {line}\n")
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

    def _file(self, folder: Path, name: str) -> TextIO:
        if name not in self._files:
            # Closed by `close`. Processes that are started again go on in the same file.
            self._files[name] = (folder / f"{name}.log").open("a", buffering=1, encoding="utf-8")
        return self._files[name]

    def _leave_stream(self) -> None:
        # What is still in the buffer would be an error once more, when Python flushes it at exit.
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
            self._logs.tell(line)
