"""How things are shown to people: durations, and a notebook's tables and displays that change in place.

The HTML sets neither colours nor fonts, so that it looks right in light and dark themes and on other pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import islice
from typing import Any, TypeVar

# Durations and times as people say them: "42 s", "3 min 05 s", "2 h 05 min", "3 days ago".

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def duration_text(seconds: float) -> str:
    """A duration in at most two units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02} h"


def ago_text(time: str, now: datetime | None = None) -> str:
    """How long ago an ISO time was; text that is no time, such as that of a damaged file, stays as it is."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return time
    if then.tzinfo is None:
        then = then.astimezone()
    seconds = ((now or datetime.now(UTC)) - then).total_seconds()
    for unit, name in ((_DAY, "day"), (_HOUR, "hour"), (_MINUTE, "minute")):
        if (count := int(seconds // unit)) >= 1:
            return f"{count} {name}{'s' * (count != 1)} ago"
    return "just now" if seconds < 5 else f"{int(seconds)} seconds ago"


MANY = 30  # rows that a table shows
_LONG = 100  # letters of a cell

Item = TypeVar("Item")


def in_notebook() -> bool:
    """Whether the program runs in a notebook: its IPython has a kernel, which displays HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Display:
    """A place below a cell of a notebook, in which each HTML replaces the one before."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, html: str, text: str) -> None:
        """Show HTML, or the text where only text can be shown.

        Args:
            html: What a notebook shows.
            text: The same for terminals.
        """
        from IPython.display import display

        content = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def html_table(
    title: str,
    head: Sequence[str],
    items: Collection[Item],
    row: Callable[[Item], Iterable[object]] = lambda item: item,  # type: ignore[assignment, return-value]
) -> str:
    """A table with a title above it.

    All text is escaped. Of many items the first are shown, with the number of the others; long cells are cut.

    Args:
        title: The line above the table.
        head: The names of the columns; without any there is no head.
        items: What has a row each.
        row: Gives the cells of an item, and is called for items that are shown. By default an item is a row.
    """
    lines = [_row("th", head)] if head else []
    lines += [_row("td", row(item)) for item in islice(items, MANY)]
    if len(items) > MANY:
        lines.append(_row("td", [f"… and {len(items) - MANY:,} more"]))
    heading = f"<div><strong>{escape(title)}</strong></div>" if title else ""
    return f'<div style="overflow-x: auto">{heading}<table>{"".join(lines)}</table></div>'


def _row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(_cell(tag, cell) for cell in cells)}</tr>"


def _cell(tag: str, value: object) -> str:
    if isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = f"{value:.5g}"
    else:
        text = str(value)
        text = text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"
    # Notebooks align all cells to the right.
    return f'<{tag} style="text-align: left">{escape(text)}</{tag}>'
