"""`Logger`: a destination of reports."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from karvan.files import replace_file
from karvan.train.reporting.results import Report

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
            try:
                log.write(report)
            except OSError as error:
                self._warn(log, f"is incomplete from step {report.step} on: {error}")
            else:
                self._failing.discard(log)

    def close(self) -> None:
        """End the fit of every logger."""
        for log in self._logs:
            try:
                log.close()
            except OSError as error:
                self._warn(log, f"could not be closed: {error}")

    def _warn(self, log: Logger, text: str) -> None:
        if log not in self._failing:
            _log.warning("%s %s", log, text)
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
