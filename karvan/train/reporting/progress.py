"""Progress: the bar or the lines that a fit prints.

On a terminal it is a live bar with step, time left, losses, metrics, samples/s, rows and memory; a narrow one
shows as many of these as fit. In a notebook it is a bar below the cell, which changes in place. Elsewhere it
is a line from time to time. `NoProgress` shows nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from karvan.notebook import Display, html_table, in_notebook
from karvan.train.reporting.bar_columns import make_columns
from karvan.train.reporting.results import Report

NAMES = ("auto", "bar", "plain", "none")


class NoProgress:
    """Shows nothing; the others derive from it."""

    def begin(self, step: int, total: int | None) -> None:
        """A fit starts after this step, and ends at `total` if that is known."""

    def step(self, step: int) -> None:
        """A step is over."""

    def report(self, report: Report) -> None:
        """There are new numbers."""

    def say(self, text: str) -> None:
        """Show a message."""

    def end(self) -> None:
        """The fit is over."""


class PlainProgress(NoProgress):
    """Lines on stderr, or on `stream`: evaluations at once, training at most every `seconds`."""

    def __init__(self, stream: IO[str] | None = None, seconds: float = 10.0) -> None:
        self._stream = stream
        self._seconds = seconds
        self._total: int | None = None
        self._last = 0.0
        self._held: Report | None = None

    def begin(self, step: int, total: int | None) -> None:
        """See `NoProgress.begin`."""
        self._total, self._last, self._held = total, 0.0, None

    def report(self, report: Report) -> None:
        """See `NoProgress.report`."""
        if report.kind == "train" and time.monotonic() < self._last + self._seconds:
            self._held = report
            return
        if report.kind == "train":
            self._last, self._held = time.monotonic(), None
        self.say(line_of(report, self._total))

    def say(self, text: str) -> None:
        """See `NoProgress.say`."""
        print(text, file=self._stream or sys.stderr, flush=True)

    def end(self) -> None:
        """See `NoProgress.end`; the last numbers are always shown."""
        if self._held is not None:
            self.say(line_of(self._held, self._total))
            self._held = None


class BarProgress(NoProgress):
    """A live bar on stderr, or on `console`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, step: int, total: int | None) -> None:
        """See `NoProgress.begin`."""
        self._bar = Progress(*make_columns(self._console, total), console=self._console, refresh_per_second=4)
        self._task = self._bar.add_task("fit", total=total, completed=step, numbers=())
        self._bar.start()

    def step(self, step: int) -> None:
        """See `NoProgress.step`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, report: Report) -> None:
        """See `NoProgress.report`; evaluations stay as lines above the bar."""
        if self._bar is None or report.kind != "train":
            self.say(line_of(report, None))
        else:
            self._bar.update(self._task, numbers=_shown(_by_interest(report.values)))

    def say(self, text: str) -> None:
        """See `NoProgress.say`."""
        (self._console if self._bar is None else self._bar.console).print(text, markup=False, highlight=False)

    def end(self) -> None:
        """See `NoProgress.end`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class NotebookProgress(NoProgress):
    """A bar below the cell of a notebook, with the newest numbers and a table of the last evaluations."""

    def __init__(self) -> None:
        self._display: Display | None = None
        self._total: int | None = None
        self._began = self._shown_at = 0.0
        self._running = False
        self._first = self._step = 0
        self._numbers: Sequence[str] = ()
        self._evaluations: list[Report] = []
        self._said: list[str] = []

    def begin(self, step: int, total: int | None) -> None:
        """See `NoProgress.begin`."""
        self._display, self._total, self._began = Display(), total, time.monotonic()
        self._running = True
        self._first = self._step = step
        self._numbers, self._evaluations, self._said = (), [], []
        self._show()

    def step(self, step: int) -> None:
        """See `NoProgress.step`; the display changes at most four times a second."""
        self._step = step
        if time.monotonic() > self._shown_at + 0.25:
            self._show()

    def report(self, report: Report) -> None:
        """See `NoProgress.report`."""
        if report.kind == "train":
            self._numbers = _shown(_by_interest(report.values))
        else:
            self._evaluations.append(report)
            self._show()

    def say(self, text: str) -> None:
        """See `NoProgress.say`; messages stay below the bar."""
        if self._display is None:
            print(text, flush=True)
        self._said.append(text)
        self._show()

    def end(self) -> None:
        """See `NoProgress.end`; the bar stays as it is, and the last messages are added to it."""
        self._show()
        self._running = False

    def _show(self) -> None:
        if self._display is None:
            return
        if self._running:
            self._shown_at = time.monotonic()
        seconds, steps = self._shown_at - self._began, self._step - self._first
        texts = [f"step {self._step:,}", _clock(seconds)]
        bar = ""
        if self._total is not None:
            texts[0] += f"/{self._total:,}"
            if steps and self._step < self._total:
                texts[1] += f", {_clock(seconds / steps * (self._total - self._step))} left"
            bar = _BAR.format(percent=100 * self._step / max(self._total, 1))
        line = "  ".join([*texts, *self._numbers])
        names = dict.fromkeys(name for report in self._evaluations for name in report.values)
        rows = [
            [each.step, *(each.values.get(name, "") for name in names)] for each in self._evaluations[-10:]
        ]
        evaluations = html_table("", ["evaluation at step", *names], rows) if rows else ""
        said = "".join(f"<div>{escape(text)}</div>" for text in self._said)
        html = f"{bar}<div>{escape(line.replace('  ', ' · '))}</div>{evaluations}{said}"
        self._display.show(html, "\n".join([line, *self._said]))


# Two layers of the colour of letters: a rail, and what is done of it.
_LAYER = "position: absolute; inset: 0; background: currentColor; "
_BAR = f"""\
<div role="progressbar" aria-valuenow="{{percent:.0f}}" style="position: relative; overflow: hidden; \
height: 6px; max-width: 60em; margin: 6px 0; border-radius: 3px">
<div style="{_LAYER}opacity: 0.2"></div>
<div style="{_LAYER}opacity: 0.7; width: {{percent:.1f}}%"></div>
</div>
"""


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def make_progress(progress: str | NoProgress) -> NoProgress:
    """The progress of that name; "auto" is a bar on a terminal or in a notebook, otherwise lines."""
    if isinstance(progress, NoProgress):
        return progress
    if progress not in NAMES:
        raise ValueError(f"progress must be one of {', '.join(NAMES)}, or an object, got {progress!r}.")
    if progress in ("auto", "bar") and in_notebook():
        return NotebookProgress()
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
