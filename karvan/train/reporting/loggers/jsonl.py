"""One JSON object a line: kind, step, epoch, samples, time, and the values. NaN and infinity become null."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any

from karvan.job.checkpoint_url import plain_path
from karvan.train.reporting.loggers.base import Logger, complete_lines, replace_lines
from karvan.train.reporting.results import Report


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
