"""`History`: every report of a run, in memory, and with checkpoints in `history.jsonl` of the run folder.

The file has one JSON object a line. A fit that resumes at a step drops the lines of later steps, because they
are trained again. A last line that a crash cut off is dropped, too. `karvan plot` reads this file.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from karvan.checkpoint.manager import HISTORY
from karvan.checkpoint.object_store.files import fetch, upload
from karvan.job.checkpoint_url import shown
from karvan.train.reporting.loggers.base import JSONLinesLogger, Logger, read_entries
from karvan.train.reporting.results import Report

_log = logging.getLogger("karvan.train")

FILE = HISTORY


class History(Logger):
    """The reports of a Trainer; `writes` says whether this rank writes the file."""

    def __init__(self, folder: Path | None, writes: bool) -> None:
        self._path = None if folder is None else folder / FILE
        self._file = None if self._path is None or not writes else JSONLinesLogger(self._path)
        self._entries: list[dict[str, Any]] = []
        self._failing = False

    @override
    def open(self, step: int) -> None:
        if self._file is not None and self._path is not None:
            try:
                fetch(self._path)  # another machine may have trained
            except OSError as error:
                _log.warning("%s begins at step %d: %s", shown(self._path), step, error)
            self._file.open(step)
        before = self._entries if self._path is None else read_entries(self._path)
        self._entries = [entry for entry in before if step and entry["step"] <= step]

    @override
    def write(self, report: Report) -> None:
        """A file that cannot be written is a warning: training does not need it."""
        self._entries.append({**report.labels(), **report.values})
        if self._file is None:
            return
        try:
            self._file.write(report)
        except OSError as error:
            if not self._failing:
                _log.warning("%s is incomplete from step %d on: %s", shown(self._path), report.step, error)
            self._failing = True
        else:
            self._failing = False

    @override
    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk, which was a warning
                self._file.close()
        if self._file is not None and self._path is not None:
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
