"""Loggers, which write the numbers of a run to files: `loggers=[...]` of a Trainer."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from karvan.argument_checks import publish
from karvan.checkpoint.files import fetch, upload
from karvan.checkpoint.manager import HISTORY
from karvan.files import replace_file
from karvan.job.checkpoint_url import plain_path, shown
from karvan.train.results import Report

__all__ = ["TensorBoardLogger", "CSVLogger", "JSONLinesLogger", "Logger", "LoggerGroup"]

_log = logging.getLogger("karvan.train")


class Logger(ABC):
    """The base class of loggers: it receives reports between `open` and `close`, which a fit calls.

    Example:
        >>> class Printer(kv.loggers.Logger):
        ...     def open(self, step):
        ...         pass
        ...     def write(self, report):
        ...         print(report.kind, report.step, report.values)
        ...     def close(self):
        ...         pass
        >>> Printer().write(kv.train.Report("eval", 100, 0, {"auc": 0.75}))
        eval 100 {'auc': 0.75}
    """

    def __str__(self) -> str:
        path = getattr(self, "_path", None)
        return type(self).__name__ if path is None else f"{type(self).__name__}({str(path)!r})"

    @abstractmethod
    def open(self, step: int) -> None:
        """Start a fit after a step.

        Reports of later steps are removed, because they come again.

        Args:
            step: The step.
        """

    @abstractmethod
    def write(self, report: Report) -> None:
        """Add a report.

        Args:
            report: The report.
        """

    @abstractmethod
    def close(self) -> None:
        """End the fit, and write everything to disk."""


class LoggerGroup(Logger):
    """Several loggers as one, or none.

    Args:
        logs: The loggers.

    Raises:
        TypeError: One of them is no logger.

    Example:
        >>> loggers = kv.loggers.LoggerGroup([kv.loggers.CSVLogger("log.csv")])
    """

    def __init__(self, logs: Iterable[Logger]) -> None:
        self._logs = list(logs)
        self._failing: set[Logger] = set()  # those that were reported to the user
        for log in self._logs:
            if not isinstance(log, Logger):
                raise TypeError(
                    f"loggers must be Loggers, such as CSVLogger(path), got {type(log).__name__}."
                )

    def open(self, step: int) -> None:
        """Start a fit of every logger."""
        for log in self._logs:
            log.open(step)

    def write(self, report: Report) -> None:
        """Add a report to every logger.

        A failure is a warning, because training does not need the log.
        """
        for log in self._logs:
            with self._warning(log, f"is incomplete from step {report.step} on"):
                log.write(report)
                self._failing.discard(log)

    def close(self) -> None:
        """End the fit of every logger."""
        for log in self._logs:
            with self._warning(log, "could not be closed"):
                log.close()

    @contextmanager
    def _warning(self, log: Logger, text: str) -> Iterator[None]:
        """An error of the file system is a warning, once until the logger works again."""
        try:
            yield
        except OSError as error:
            if log not in self._failing:
                _log.warning("%s %s: %s", log, text, error)
            self._failing.add(log)


def complete_lines(path: Path) -> list[str]:
    """The lines of a file, without a last one that a crash cut off, and without blocks of zeros, which a loss
    of power leaves; none if there is no file.
    """
    text = path.read_text(errors="replace") if path.exists() else ""
    return text[: text.rfind("\n") + 1].replace("\0", "").splitlines()


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Give a file other lines; it has its old or its new ones at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(f"{line}\n" for line in lines))


# A table with a row for each report; a column for each value, added when it first comes.


_FIRST = ("kind", "step", "epoch")


class CSVLogger(Logger):
    """Write reports as CSV, a row each.

    Args:
        path: The file.

    Example:
        >>> logger = kv.loggers.CSVLogger("log.csv")  # loggers=[logger] of a Trainer
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = plain_path(path)
        self._columns: list[str] = list(_FIRST)

    def open(self, step: int) -> None:
        """Remove the rows of later steps."""
        rows = self._rows() if step else []
        self._columns = list(rows[0]) if rows else list(_FIRST)
        self._rewrite([row for row in rows if int(row["step"]) <= step])

    def write(self, report: Report) -> None:
        """Add a row."""
        row = {**report.labels(), **report.values}
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self._rewrite(self._rows())
        with self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in self._lines([row]))

    def close(self) -> None:
        """Close the file; every row is on disk already."""

    def _rows(self) -> list[dict[str, Any]]:
        """The rows of the file, without those that a crash or a full disk has damaged."""
        rows = csv.DictReader(complete_lines(self._path))
        return [row for row in rows if None not in row and (row.get("step") or "").isdecimal()]

    def _rewrite(self, rows: Sequence[dict[str, Any]]) -> None:
        header = dict(zip(self._columns, self._columns, strict=True))
        replace_lines(self._path, self._lines([header, *rows]))

    def _lines(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue().splitlines()


# One JSON object a line: kind, step, epoch, samples, time, and the values. NaN and infinity become null.


class JSONLinesLogger(Logger):
    """Write reports as JSON, a line each.

    Args:
        path: The file.

    Example:
        >>> logger = kv.loggers.JSONLinesLogger("log.jsonl")
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = plain_path(path)
        self._file: IO[str] | None = None

    def open(self, step: int) -> None:
        """Remove the lines of later steps."""
        entries = read_entries(self._path) if step else []
        replace_lines(self._path, [json.dumps(entry) for entry in entries if entry["step"] <= step])
        self._file = self._path.open("a")

    def write(self, report: Report) -> None:
        """Add a line."""
        assert self._file is not None
        values = {name: value if math.isfinite(value) else None for name, value in report.values.items()}
        print(json.dumps({**report.labels(), **values}), file=self._file, flush=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a file; lines that a crash or a full disk has damaged are skipped."""
    entries = []
    for line in complete_lines(path):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


# Scalars for TensorBoard, which is an extra: pip install 'karvan[monitor]'.


class TensorBoardLogger(Logger):
    """Write reports as scalars named train/loss, eval/auc, … for `tensorboard --logdir`.

    Args:
        folder: The folder of the scalars.

    Raises:
        ImportError: tensorboard is not installed: `pip install 'karvan[monitor]'`.

    Example:
        >>> logger = kv.loggers.TensorBoardLogger("tensorboard")  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardLogger needs tensorboard: pip install 'karvan[monitor]'."
            ) from error
        self._make: Any = SummaryWriter
        self._folder = os.fspath(folder)
        self._writer: Any = None

    def open(self, step: int) -> None:
        """Start a fit; TensorBoard hides what was logged for later steps."""
        self._writer = self._make(self._folder, purge_step=step + 1 if step else None)

    def write(self, report: Report) -> None:
        """Add a scalar for each number."""
        for name, value in report.values.items():
            self._writer.add_scalar(f"{report.kind}/{name}", value, report.step)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


# `History`: every report of a run, in memory, and with checkpoints in `history.jsonl` of the run folder.
#
# The file has one JSON object a line. A fit that resumes at a step drops the lines of later steps, because
# they are trained again. A last line that a crash cut off is dropped, too. `karvan plot` reads this file.


FILE = HISTORY


class History(Logger):
    """The reports of a Trainer; `writes` says whether this rank writes the file."""

    def __init__(self, folder: Path | None, writes: bool) -> None:
        self._path = None if folder is None else folder / FILE
        self._file = None if self._path is None or not writes else JSONLinesLogger(self._path)
        self._entries: list[dict[str, Any]] = []

    def __str__(self) -> str:
        return shown(self._path)

    @override
    def open(self, step: int) -> None:
        if self._file is not None and self._path is not None:
            try:
                fetch(self._path)  # another machine may have trained
            except OSError as error:
                _log.warning("%s begins at step %d: %s", self, step, error)
            self._file.open(step)
        before = self._entries if self._path is None else read_entries(self._path)
        self._entries = [entry for entry in before if step and entry["step"] <= step]

    @override
    def write(self, report: Report) -> None:
        self._entries.append({**report.labels(), **report.values})
        if self._file is not None:
            self._file.write(report)

    @override
    def close(self) -> None:
        if self._file is not None and self._path is not None:
            with suppress(OSError):  # a full disk, which was a warning
                self._file.close()
            with suppress(OSError):  # as far as it was complete at the last save, it is there
                upload(self._path)

    def rows(self) -> list[dict[str, Any]]:
        """All reports; before the first fit those that are in the run folder."""
        if not self._entries and self._path is not None:
            return read_entries(self._path)
        return self._entries

    def frame(self) -> Any:
        """A pandas DataFrame with a row for each report; numbers that a report does not have are NaN."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("trainer.history is a DataFrame of pandas: pip install pandas.") from error
        first = ["kind", "step", "epoch"]
        columns = list(dict.fromkeys([*first, *(name for entry in self._entries for name in entry)]))
        rows = [
            {name: math.nan if value is None else value for name, value in entry.items()}
            for entry in self._entries
        ]
        return pandas.DataFrame(rows, columns=columns)


publish("karvan.train.loggers")
