"""The charts for the history of runs, and the numbers in them, as JSON for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from karvan.monitor.run_history import KINDS, Entry, RunHistory

_TITLES = {
    "loss": "Loss",
    "auc": "AUC",
    "gauc": "GAUC",
    "logloss": "Log-loss",
    "calibration": "Calibration",
    "mae": "MAE",
    "mse": "MSE",
}
_SPEED = {
    "samples_per_second": ("Throughput", "samples/s", "count"),
    "rows": ("Table rows", "rows", "count"),
    "memory": ("Memory", "", "bytes"),
    "staleness": ("Staleness", "batches", "plain"),
    "staleness_max": ("Largest staleness", "batches", "plain"),
    "dense_staleness": ("Staleness of dense parameters", "steps", "plain"),
}
_MANY_TABLES = 8  # more lines than that are hard to tell apart
_WORDS = {"train": "training", "eval": "evaluation"}


def page_data(runs: Sequence[RunHistory]) -> dict[str, Any]:
    """All data that the page draws."""
    return {"runs": [_run(run) for run in runs], "charts": make_charts(runs)}


def make_charts(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    """The charts, in the order of the page.

    A chart has one or more views, of which the reader selects one; a view has lines, which every run draws
    as far as it has the numbers. `reference` is a value that a horizontal line marks.
    """
    charts = [_quality_chart(runs, name) for name in value_names(runs) if is_quality(name)]
    rates = [name for name in value_names(runs) if name.startswith("lr/")]
    if rates:
        lines = [_line("train", name, name.removeprefix("lr/")) for name in rates]
        view = _view("", lines, by_line=len(runs) == 1 and len(lines) > 1)
        charts.append(_chart("Learning rate", "", "plain", [view], "Learning"))
    for name, (title, unit, form) in _SPEED.items():
        if name in value_names(runs):
            views = _row_views(runs) if name == "rows" else [_view("", [_line("train", name, "")])]
            charts.append(_chart(title, unit, form, views, "Speed and size"))
    return charts


def value_names(runs: Iterable[RunHistory]) -> list[str]:
    """All names of numbers: losses, AUC, other metrics in the order in which they came, then the rest."""
    names = list(dict.fromkeys(name for run in runs for entry in run.entries for name in entry.values))

    def order(name: str) -> tuple[bool, ...]:
        return (not is_quality(name), name != "loss", not name.startswith("loss/"), name != "auc")

    return sorted(names, key=order)


def title_of(name: str) -> str:
    """The title of a number."""
    if name.startswith("loss/"):
        return f"Loss: {name.removeprefix('loss/')}"
    return _TITLES.get(name, name)


def is_quality(name: str) -> bool:
    """Whether it measures how good the model is: a loss or a metric."""
    return name not in _SPEED and not name.startswith(("lr/", "rows/"))


def _quality_chart(runs: Sequence[RunHistory], name: str) -> dict[str, Any]:
    kinds = [kind for kind in KINDS if any(name in entry.values for run in runs for entry in run.of(kind))]
    lines = [_line(kind, name, _WORDS[kind]) for kind in kinds]
    chart = _chart(title_of(name), "", "plain", [_view("", lines)], "Learning")
    if "calibration" in name.lower():
        chart |= {"reference": 1.0, "unit": "predicted / observed"}
    return chart


def _row_views(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    tables = [name for name in value_names(runs) if name.startswith("rows/")]
    lines = [_line("train", name, name.removeprefix("rows/")) for name in tables]
    total = _view("all tables together", [_line("train", "rows", "")])
    if len(lines) < 2:
        return [total]
    each = _view("each table", lines, by_line=len(runs) == 1)
    first = [each, total] if len(lines) <= _MANY_TABLES and len(runs) == 1 else [total, each]
    return [*first, *(_view(line["label"], [line]) for line in lines)]


def _chart(title: str, unit: str, form: str, views: Sequence[dict[str, Any]], section: str) -> dict[str, Any]:
    return {
        "title": title,
        "unit": unit,
        "form": form,
        "views": list(views),
        "section": section,
        # Smoothing would delay the rest: metrics are means since the start of the epoch, sizes are exact.
        "noisy": title.startswith("Loss") or title == "Throughput",
    }


def _view(label: str, lines: Sequence[dict[str, Any]], by_line: bool = False) -> dict[str, Any]:
    """`by_line`: each line has its own colour, instead of that of its run."""
    return {"label": label, "lines": list(lines), "byLine": by_line}


def _line(kind: str, name: str, label: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, "label": label}


def _run(run: RunHistory) -> dict[str, Any]:
    start = next((entry.time for entry in run.entries if entry.time is not None), None)
    return {
        "name": run.name,
        "path": str(run.path),
        **{kind: _columns(run.of(kind), start) for kind in KINDS},
    }


def _columns(entries: Sequence[Entry], start: float | None) -> dict[str, Any]:
    names = dict.fromkeys(name for entry in entries for name in entry.values)
    return {
        "step": [entry.step for entry in entries],
        "samples": [entry.samples for entry in entries],
        "seconds": [
            None if entry.time is None or start is None else round(entry.time - start, 3) for entry in entries
        ],
        "values": {name: [entry.values.get(name) for entry in entries] for name in names},
    }
