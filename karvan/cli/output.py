"""Output of commands: results on stdout, messages and errors on stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from karvan import errors
from karvan.errors import DAMAGED, FAILED, INTERRUPTED, OK, PIPE_CLOSED, TEMPORARY, TERMINATED, USAGE
from karvan.job.checkpoint_url import local_path, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


# Errors of the command line; the exit codes are in `karvan/errors.py`.

STOPPED = {"interrupt": INTERRUPTED, "terminate": TERMINATED}  # by `FitResult.stopped`


class CommandError(Exception):
    """An error to be shown as it is, and the exit code that goes with it."""

    def __init__(self, text: str, code: int = USAGE) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def refusing(*kinds: type[Exception], code: int = USAGE, where: str = "") -> Iterator[None]:
    """Errors of these kinds become `CommandError`s with their text, and with this place before it."""
    try:
        yield
    except kinds as error:
        raise CommandError(f"{where}{error}", code) from error


def code_of(error: BaseException) -> int:
    """The exit code of an error that a command raised."""
    return error.code if isinstance(error, CommandError) else errors.code_of(error)


def text_of(error: BaseException) -> str:
    """One or two lines: what was expected, what was received, and where, if that helps."""
    return str(error).strip() if isinstance(error, CommandError) else errors.text_of(error)


def show(error: BaseException, *, debug: bool) -> None:
    """Print an error to stderr."""
    if debug:
        traceback.print_exception(error)
    print_error(text_of(error))


def print_error(text: str) -> None:
    """Print `error: …` to stderr, the word in red if there are colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty())  # a terminal folds between words
    console.print(Text.assemble(("error:", "bold red"), " ", text), highlight=False)


# Paths and URLs on the command line.


def folder_of(text: str) -> Path:
    """The path of a folder that may be a URL; see `karvan/job/checkpoint_url.py`."""
    with refusing(ValueError):
        return local_path(text)


def no_url(path: Path | None) -> Path | None:
    """The callback of an option that is a folder of this machine."""
    try:
        return None if path is None else local_path(path)
    except ValueError:
        raise typer.BadParameter(f"expected a folder of this machine, got the URL {path}.") from None


__all__ = [
    "DAMAGED",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "PIPE_CLOSED",
    "STOPPED",
    "TEMPORARY",
    "TERMINATED",
    "USAGE",
]


_UNLIMITED = 1_000_000  # columns


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr. If that is not a terminal, lines are not wrapped."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _UNLIMITED, highlight=False)


def print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()
) -> None:
    """Print a table to stdout; `right` names the columns of numbers.

    A terminal that is too narrow folds values. Elsewhere every value is complete, in plain text.
    """
    from rich.text import Text

    cells, numbers = [[str(value) for value in row] for row in rows], set(right)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = []
    for row in (columns, *cells):
        padded = [
            text.rjust(width) if name in numbers else text.ljust(width)
            for name, text, width in zip(columns, row, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    out = console()
    if title is not None:
        out.print(Text(title, style="bold"))
    if max(map(len, lines)) > out.width:
        _print_folded(columns, cells, numbers)
        return
    out.print(Text(lines[0], style="bold"))
    for line in lines[1:]:
        out.print(Text(line))


def _print_folded(columns: Sequence[str], rows: list[list[str]], numbers: set[str]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console().print(table)


def help_of(command: Callable[..., object]) -> str:
    """A command's docstring for --help, which folds paragraphs unless they begin with \\b."""
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(
        paragraph if paragraph.startswith("\b") else " ".join(paragraph.split()) for paragraph in paragraphs
    )


def _json_path(path: str | None) -> str | None:
    if path not in (None, "-") and not Path(path).parent.is_dir():
        raise CommandError(f"--json expects - or a path in a folder that exists, got '{path}'.")
    return path


JSON_PATH = Option(
    None, "--json", metavar="PATH", help="Write the result as JSON to PATH; - is stdout.", callback=_json_path
)


def write_json(path: str | None, value: Any) -> bool:
    """Write a result to the path of --json; whether that was stdout, which then gets nothing else."""
    if path is None:
        return False
    text = json.dumps(plain(value), indent=2) + "\n"
    if path != "-":
        Path(path).write_text(text)
        return False
    sys.stdout.write(text)
    return True


def plain(value: Any) -> Any:
    """As values that JSON can express; NaN and infinity become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return shown(value) if isinstance(value, Path) else value


def bytes_text(count: float) -> str:
    """A size such as "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def number_text(value: float) -> str:
    """A metric with four digits."""
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.3g}"


class ProgressSteps:
    """Shows progress; does nothing without a terminal."""

    def __init__(self, bar: Progress | None, unit: str) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None, unit=unit)

    def expect(self, total: float) -> None:
        """Set the total."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=total)

    def add(self, amount: float) -> None:
        """Advance by an amount."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, amount)


@contextmanager
def progress(text: str, unit: str, *, quiet: bool = False) -> Iterator[ProgressSteps]:
    """A progress bar on stderr, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield ProgressSteps(None, unit)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn(text),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:,.0f} {task.fields[unit]}"),
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
    )
    with bar:
        yield ProgressSteps(bar, unit)


class CountedBatches:
    """Data whose samples are counted as its batches are taken."""

    def __init__(self, data: Iterable[Any], steps: ProgressSteps) -> None:
        self._data = data
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        from karvan.train.types import samples_of

        for batch in self._data:
            yield batch
            self._steps.add(samples_of(batch))


_BLOCK = 8 << 20


def disk_rate(folder: Path, size: int = 64 << 20) -> float:
    """Bytes per second that reach the disk: written to a temporary file in the folder, and flushed."""
    block = os.urandom(_BLOCK)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".karvan-disk-") as file:
        begin = time.perf_counter()
        for _ in range(max(1, size // _BLOCK)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return max(1, size // _BLOCK) * _BLOCK / (time.perf_counter() - begin)
