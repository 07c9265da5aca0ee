"""A table with a row for each report; a column for each value, added when it first comes."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from typing import Any

from karvan.job.checkpoint_url import plain_path
from karvan.train.reporting.loggers.base import Logger, complete_lines, replace_lines
from karvan.train.reporting.results import Report

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
