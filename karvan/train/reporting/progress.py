"""Progress: the bar or the lines that a fit prints.

On a terminal it is a live bar with step, time left, losses, metrics, samples/s, rows and memory; a narrow one
shows as many of these as fit. Without a terminal it is a line from time to time. `NoProgress` shows nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from karvan.train.reporting.bar_columns import make_columns
from karvan.train.reporting.results import Report

NAMES = ("auto", "bar", "plain", "none")


class NoProgress:
    """Show nothing; derive from it for a display of your own.

    Example:
        >>> class Dots(kv.train.NoProgress):
        ...     def step(self, step):
        ...         print(".", end="")
        >>> progress = Dots()  # for kv.Trainer(..., progress=progress)
    """

    def begin(self, step: int, total: int | None) -> None:
        """Called when a fit starts.

        Args:
            step: The steps before this fit.
            total: The last step, if it is known.
        """

    def step(self, step: int) -> None:
        """Called after a step.

        Args:
            step: The number of the step.
        """

    def report(self, report: Report) -> None:
        """Called with new numbers.

        Args:
            report: The numbers.
        """

    def say(self, text: str) -> None:
        """Show a message.

        Args:
            text: The message.
        """

    def end(self) -> None:
        """Called when the fit is over."""


class PlainProgress(NoProgress):
    """Show progress as lines: evaluations at once, training now and then.

    Args:
        stream: Where lines are written; by default stderr.
        seconds: How many seconds are at least between two lines about training.

    Example:
        >>> progress = kv.train.PlainProgress(seconds=60)  # for kv.Trainer
    """

    def __init__(self, stream: IO[str] | None = None, seconds: float = 10.0) -> None:
        self._stream = stream
        self._seconds = seconds
        self._total: int | None = None
        self._last = 0.0
        self._held: Report | None = None

    def begin(self, step: int, total: int | None) -> None:
        """Start the clock."""
        self._total, self._last, self._held = total, 0.0, None

    def report(self, report: Report) -> None:
        """Show the numbers, or keep them for the next line."""
        if report.kind == "train" and time.monotonic() < self._last + self._seconds:
            self._held = report
            return
        if report.kind == "train":
            self._last, self._held = time.monotonic(), None
        self.say(line_of(report, self._total))

    def say(self, text: str) -> None:
        """Write the message as a line."""
        print(text, file=self._stream or sys.stderr, flush=True)

    def end(self) -> None:
        """Show the last numbers."""
        if self._held is not None:
            self.say(line_of(self._held, self._total))
            self._held = None


class BarProgress(NoProgress):
    """Show progress as a live bar, with evaluations as lines above it.

    Args:
        console: A console of rich; by default one on stderr.

    Example:
        >>> progress = kv.train.BarProgress()  # for kv.Trainer(..., progress=progress)
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, step: int, total: int | None) -> None:
        """Show the bar."""
        self._bar = Progress(*make_columns(self._console, total), console=self._console, refresh_per_second=4)
        self._task = self._bar.add_task("fit", total=total, completed=step, numbers=())
        self._bar.start()

    def step(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, report: Report) -> None:
        """Show training in the bar, and evaluations above it."""
        if self._bar is None or report.kind != "train":
            self.say(line_of(report, None))
        else:
            self._bar.update(self._task, numbers=_shown(_by_interest(report.values)))

    def say(self, text: str) -> None:
        """Write the message above the bar."""
        (self._console if self._bar is None else self._bar.console).print(text, markup=False, highlight=False)

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def make_progress(progress: str | NoProgress) -> NoProgress:
    """The progress of that name; "auto" is a bar on a terminal and plain lines otherwise."""
    if isinstance(progress, NoProgress):
        return progress
    if progress not in NAMES:
        raise ValueError(f"progress must be one of {', '.join(NAMES)}, or an object, got {progress!r}.")
    if progress == "auto":
        progress = "bar" if sys.stderr.isatty() else "plain"
    kinds: dict[str, type[NoProgress]] = {"bar": BarProgress, "plain": PlainProgress, "none": NoProgress}
    return kinds[progress]()


def line_of(report: Report, total: int | None) -> str:
    """A report as a line of text."""
    known = "" if total is None else f"/{total:,}"
    kind = "" if report.kind == "train" else f"  {report.kind}"
    return "  ".join([f"step {report.step:,}{known}{kind}", *_shown(report.values)])


def memory_bytes(device: torch.device) -> int:
    """The resident memory of the process, or on a GPU what torch has allocated there."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


_LAST = ("samples_per_second", "rows", "memory")


def _by_interest(values: Mapping[str, float]) -> dict[str, float]:
    """Losses and metrics first, because a narrow terminal shows the beginning; no learning rates."""
    first = {name: value for name, value in values.items() if not name.startswith("lr/")}
    return dict(sorted(first.items(), key=lambda item: _LAST.index(item[0]) if item[0] in _LAST else -1))


def _shown(values: Mapping[str, float]) -> list[str]:
    shown = []
    for name, value in values.items():
        if name.startswith("rows/"):
            continue  # the history has them; here they would crowd out the rest
        if name == "samples_per_second":
            shown.append(f"{value:,.0f} samples/s")
        elif name == "rows":
            shown.append(f"{value:,.0f} rows")
        elif name == "memory":
            shown.append(f"{value / 2**30:.2f} GiB")
        elif name == "auc":
            shown.append(f"AUC {value:.4f}")
        else:
            shown.append(f"{name} {value:.4g}" if abs(value) < 1e-3 else f"{name} {value:.4f}")
    return shown
