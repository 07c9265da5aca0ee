"""Progress: the bar or the lines that a fit prints.

On a terminal it is a live bar with step, time left, losses, metrics, samples per second, rows and memory; a
narrow one shows as many of these as fit. In a notebook it is a bar below the cell, which changes in place.
Elsewhere it is a line from time to time. `NoProgress` shows nothing.

A fit has numbers every `log_every` steps. Unless the program has set that, a fit also shows numbers when
progress wants them: after 1, 2, 5, 10, 20, 50, … steps, so that people see something at once, and at least
every 10 seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import IO

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from karvan.display import Display, html_table, in_notebook
from karvan.train.results import Report

# The columns of the progress bar: step and times always fit, numbers as far as there is room.


_WIDE, _NARROW = 100, 70  # columns of a terminal


def make_columns(console: Console, total: int | None) -> list[ProgressColumn]:
    """The columns for a fit of `total` steps; without a total, remaining time is not shown."""
    suffix = "" if total is None else f"/{total:,}"
    last: list[ProgressColumn] = [TimeElapsedColumn(_fixed())]
    if total is not None:
        last += [TextColumn("left", table_column=_fixed()), TimeRemainingColumn(table_column=_fixed())]
    return [
        SpinnerColumn(table_column=_fixed()),
        TextColumn(f"step {{task.completed:,.0f}}{suffix}", table_column=_fixed()),
        _Bar(console),
        *last,
        _Numbers(),
    ]


class _Bar(ProgressColumn):
    """A bar that becomes shorter on a narrow terminal."""

    max_refresh = None

    def __init__(self, console: Console) -> None:
        super().__init__(_fixed())
        self._console = console

    def render(self, task: Task) -> ProgressBar:
        """The bar."""
        width = self._console.width
        return ProgressBar(
            total=task.total,
            completed=task.completed,
            width=20 if width >= _WIDE else 10 if width >= _NARROW else 4,
            pulse=task.total is None,
            animation_time=task.get_time(),
        )


class _Numbers(ProgressColumn):
    """Losses, metrics and speeds: the only column that is shortened."""

    def render(self, task: Task) -> _Fitting:
        """The numbers."""
        return _Fitting(task.fields["numbers"])


class _Fitting:
    """As many of some texts as fit into a line, each complete."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for text in self._texts:
            longer = f"{line}  {text}" if line else text
            if len(longer) > options.max_width:
                break
            line = longer
        yield Text(line, no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, len("  ".join(self._texts))))


def _fixed() -> Column:
    return Column(no_wrap=True)


NAMES = ("auto", "bar", "plain", "none")
_SECONDS = 10.0  # between two reports to people, at most


class NoProgress:
    """Show nothing; derive from it for a display of your own.

    Example:
        >>> class Dots(kv.train.NoProgress):
        ...     def step(self, step):
        ...         print(".", end="")
        >>> progress = Dots()  # for kv.Trainer(..., progress=progress)
    """

    @property
    def next_report(self) -> int | None:
        """The step after which it wants numbers, besides those of every `log_every` steps; None: never."""
        return None

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


class _ScheduledProgress(NoProgress):
    """Wants numbers after 1, 2, 5, 10, 20, 50, … steps of a fit, and `seconds` later at most."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._start(0, None)

    def _start(self, step: int, total: int | None) -> None:
        """A fit starts after this step."""
        self._first, self._total = step, total
        self._next = step + 1
        self._last = (step, time.monotonic())

    @property
    def next_report(self) -> int | None:
        """The next step of the schedule."""
        return self._next

    def _due(self, step: int) -> bool:
        """Whether numbers of this step are to be shown."""
        return step >= self._next or time.monotonic() >= self._last[1] + self._seconds

    def _note_shown(self, step: int) -> None:
        """The numbers of this step are shown. Ranks agree on a step, not on a time, so time becomes steps."""
        (before, then), self._last = self._last, (step, time.monotonic())
        rate = (step - before) / max(self._last[1] - then, 1e-9)
        by_count = self._first + _next_round(step - self._first)
        self._next = min(by_count, step + max(1, int(rate * self._seconds)))


def _next_round(number: int) -> int:
    """The first of 1, 2, 5, 10, 20, 50, … that is larger."""
    power = int("1" + "0" * (len(str(number)) - 1))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step > number)


class PlainProgress(_ScheduledProgress):
    """Show progress as lines: evaluations at once, training after the first steps and then by time.

    Args:
        stream: Where lines are written; by default stderr.
        seconds: How many seconds after a line the next one comes, once the first steps are over.

    Example:
        >>> progress = kv.train.PlainProgress(seconds=60)  # for kv.Trainer
    """

    def __init__(self, stream: IO[str] | None = None, seconds: float = _SECONDS) -> None:
        self._stream = stream
        super().__init__(seconds)
        self._held: Report | None = None
        self._shown_step = -1
        self._widths: dict[str, int] = {}
        self._rates: dict[str, float] = {}  # learning rates at first
        self._rates_move = False  # whether a schedule has changed them, so that they are shown

    def begin(self, step: int, total: int | None) -> None:
        """Start the schedule."""
        self._start(step, total)
        self._held, self._shown_step = None, -1

    def report(self, report: Report) -> None:
        """Show the numbers, or keep them for the next line."""
        if report.kind != "train":
            self.say(line_of(report, self._total))
        elif self._due(report.step):
            self._show(report)
        else:
            self._held = report

    def _show(self, report: Report) -> None:
        """Print a line of training, its fields below those of the line before."""
        self._held = None
        if report.step == self._shown_step:
            return
        self._shown_step = report.step
        self._note_shown(report.step)
        rates = {name: value for name, value in report.values.items() if name.startswith("lr/")}
        self._rates = self._rates or rates
        self._rates_move = self._rates_move or rates != self._rates
        self.say(line_of(report, self._total, self._widths, rates=self._rates_move))

    def say(self, text: str) -> None:
        """Write the message as a line."""
        print(text, file=self._stream or sys.stderr, flush=True)

    def end(self) -> None:
        """Show the last numbers."""
        if self._held is not None:
            self._show(self._held)


class BarProgress(_ScheduledProgress):
    """Show progress as a live bar, with evaluations as lines above it.

    Args:
        console: A console of rich; by default one on stderr.

    Example:
        >>> progress = kv.train.BarProgress()  # for kv.Trainer(..., progress=progress)
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        super().__init__()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, step: int, total: int | None) -> None:
        """Show the bar."""
        self._start(step, total)
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
            self._note_shown(report.step)
            self._bar.update(self._task, numbers=list(_shown(report).values()))

    def say(self, text: str) -> None:
        """Write the message above the bar."""
        (self._console if self._bar is None else self._bar.console).print(text, markup=False, highlight=False)

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class NotebookProgress(_ScheduledProgress):
    """A bar below the cell of a notebook, with the newest numbers and a table of the last evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self._display: Display | None = None
        self._began = self._shown_at = 0.0
        self._running = False
        self._step = 0
        self._numbers: Sequence[str] = ()
        self._evaluations: list[Report] = []
        self._said: list[str] = []

    @override
    def begin(self, step: int, total: int | None) -> None:
        self._start(step, total)
        self._display, self._began = Display(), time.monotonic()
        self._running = True
        self._step = step
        self._numbers, self._evaluations, self._said = (), [], []
        self._show()

    @override
    def step(self, step: int) -> None:
        """The display changes at most four times a second."""
        self._step = step
        if time.monotonic() > self._shown_at + 0.25:
            self._show()

    @override
    def report(self, report: Report) -> None:
        if report.kind == "train":
            self._note_shown(report.step)
            self._numbers = list(_shown(report).values())
        else:
            self._evaluations.append(report)
            self._show()

    @override
    def say(self, text: str) -> None:
        """Messages stay below the bar."""
        if self._display is None:
            print(text, flush=True)
        self._said.append(text)
        self._show()

    @override
    def end(self) -> None:
        """The bar stays as it is, and the last messages are added to it."""
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
            [evaluation.step, *(evaluation.values.get(name, "") for name in names)]
            for evaluation in self._evaluations[-10:]
        ]
        evaluations = html_table("", ["evaluation at step", *names], rows) if rows else ""
        lines = "".join(f"<div>{escape(text)}</div>" for text in self._said)
        html = f"{bar}<div>{escape(line.replace('  ', ' · '))}</div>{evaluations}{lines}"
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


def line_of(
    report: Report, total: int | None, widths: dict[str, int] | None = None, *, rates: bool = False
) -> str:
    """A report as a line of text; fields are as wide as in earlier lines with the same `widths`, by name."""
    step = f"{report.step:,}"
    if total is not None:
        step = f"{step.rjust(len(f'{total:,}'))}/{total:,}"
    fields = _shown(report, rates=rates)
    if widths is not None:
        for name, text in fields.items():
            widths[name] = max(widths.get(name, 0), len(text))
            fields[name] = text.rjust(widths[name])
    kind = [] if report.kind == "train" else [report.kind]
    return "  ".join([f"step {step}", *kind, *fields.values()])


def memory_bytes(device: torch.device) -> int:
    """The resident memory of the process, or on a GPU what torch has allocated there."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_owner(device: torch.device, ranks: int) -> str:
    """Whose memory the sum of `memory_bytes` over all ranks is."""
    singular, several = ("GPU", "GPUs") if device.type == "cuda" else ("process", "processes")
    return singular if ranks == 1 else f"{ranks} {several}"


# Shown behind losses and metrics, because a narrow terminal shows what comes first.
_LAST = ("samples_per_second", "rows", "memory", "staleness", "staleness_max", "dense_staleness")


def _shown(report: Report, *, rates: bool = False) -> dict[str, str]:
    """The numbers that people want, as text by name, with learning rates if these change.

    The history has all.
    """
    hidden = ("rows/",) if rates else ("rows/", "lr/")
    values = {name: value for name, value in report.values.items() if not name.startswith(hidden)}
    texts = {}
    for name in sorted(values, key=_place):
        value = values[name]
        if name == "samples_per_second":
            texts[name] = f"{_short(value)}/s"
        elif name == "rows":
            texts[name] = f"{_short(value)} rows"
        elif name == "memory":
            texts[name] = f"{report.memory_of} {_three_digits(value / 2**30)} GiB"
        elif name == "auc":
            texts[name] = f"AUC {value:.4f}"
        elif name.startswith("lr/"):
            texts[name] = f"{name} {value:.4g}"
        else:
            texts[name] = f"{name} {value:.4g}" if abs(value) < 1e-3 else f"{name} {value:.4f}"
    return texts


_UNITS = (("k", 1e3), ("M", 1e6), ("B", 1e9))


def _short(number: float) -> str:
    """A count in at most five letters, such as 252k."""
    if not number >= 9_999.5:
        return f"{number:,.0f}"
    unit, size = next((unit_ for unit_ in _UNITS if number < 999.5 * unit_[1]), _UNITS[-1])
    return f"{_three_digits(number / size)}{unit}"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _place(name: str) -> int:
    """Losses and metrics first, in their order, learning rates last."""
    return _LAST.index(name) if name in _LAST else len(_LAST) if name.startswith("lr/") else -1
