"""The columns of the progress bar: step and times always fit, numbers as far as there is room."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

_WIDE, _NARROW = 100, 70  # columns of a terminal


def make_columns(console: Console, total: int | None) -> list[ProgressColumn]:
    """The columns for a fit of `total` steps; without a total, remaining time is not shown."""
    known = "" if total is None else f"/{total:,}"
    last: list[ProgressColumn] = [TimeElapsedColumn(_fixed())]
    if total is not None:
        last += [TextColumn("left", table_column=_fixed()), TimeRemainingColumn(table_column=_fixed())]
    return [
        SpinnerColumn(table_column=_fixed()),
        TextColumn(f"step {{task.completed:,.0f}}{known}", table_column=_fixed()),
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
