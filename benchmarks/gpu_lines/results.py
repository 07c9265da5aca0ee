"""`Results`: the figures of a run, as a table for people and as JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from common import Report, table


@dataclass(frozen=True)
class Wanted:
    """A limit of a figure: at least so much, or at most."""

    limit: float
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """Whether a figure is within the limit."""
        return value <= self.limit if self.at_most else value >= self.limit


class Results:
    """What was measured, line by line; a figure has its share of the bytes bound where there is one.

    That is the share of its time in which the bytes that the work must move could be copied.
    """

    def __init__(self, quick: bool, json: str | None = None) -> None:
        self.report = Report("gpu", quick)
        self.failed: list[str] = []
        self._json = json
        self._lines: list[list[str]] = []
        self._remarks: list[str] = []

    def add(
        self,
        key: str,
        what: str,
        value: float,
        unit: str = "",
        wanted: Wanted | None = None,
        share: float | None = None,
    ) -> None:
        """A figure, with its share of the bytes bound."""
        self.report.figures[key] = value
        if share is not None:
            self.report.figures[f"{key}_share_of_bytes_bound"] = share
        self._show(what, value, unit, wanted, share)

    def ratio(
        self, key: str, what: str, value: float, wanted: Wanted | None = None, share: float | None = None
    ) -> None:
        """A ratio."""
        self.report.ratios[key] = value
        self._show(what, value, "x", wanted, share)

    def note(self, **figures: float | str) -> None:
        """Figures that explain others; they are in the JSON only."""
        self.report.figures |= figures

    def skip(self, line: str, why: str) -> None:
        """A line that was not measured."""
        self.report.figures[f"{line}_skipped"] = why
        self._remark(f"{line} was skipped: {why}")

    def fail(self, line: str, error: Exception) -> None:
        """A line that raised an error."""
        self.failed.append(line)
        first = str(error).splitlines()[0] if str(error) else ""
        why = f"{type(error).__name__}: {first}"
        self.report.figures[f"{line}_failed"] = why
        self._remark(f"{line} failed: {why}")

    def save(self) -> None:
        """Write what is known so far, unless it goes to stdout at the end."""
        self.report.finish()
        if self._json != "-":
            self.report.write(self._json)

    def show(self) -> None:
        """Print the table, or the JSON where that is asked for on stdout."""
        if self._json == "-":
            self.report.write("-")
            return
        print(f"\n{table(['line', 'measured', 'wanted', 'met', 'of the bytes bound'], self._lines)}")
        print("\n".join(["", *self._remarks]) if self._remarks else "")

    def _remark(self, text: str) -> None:
        self._remarks.append(text)
        print(text, file=sys.stderr, flush=True)

    def _show(self, what: str, value: float, unit: str, wanted: Wanted | None, share: float | None) -> None:
        limit, met = "", ""
        if wanted is not None:
            limit = f"{'≤' if wanted.at_most else '≥'} {wanted.limit:g}"
            met = "yes" if wanted.is_met(value) else "NO"
        bound = "" if share is None else f"{share:.2f}"
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        self._lines.append([what, f"{text} {unit}".strip(), limit, met, bound])
        print(f"{what.strip()}: {text} {unit}", file=sys.stderr, flush=True)
