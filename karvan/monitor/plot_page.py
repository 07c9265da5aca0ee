"""`plot_page`: one HTML file with the charts of some runs; `RunHistory`: the reports that a run has written.

Style and script are in the page, and its content security policy forbids every request, so it can be mailed
or stored with a run. All text that comes from a run is escaped here, or set as text by the script.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

# `RunHistory`: the reports of a run, read from its folder or from a log file.
#
# | path | what is read |
# |---|---|
# | a run folder | its `history.jsonl` |
# | a checkpoint in it | the same |
# | a file | what `JSONLinesLogger` or `CSVLogger` wrote |
#
# Damaged lines, such as a last one that a crash cut off, are skipped. This module imports neither torch nor
# numpy, so that the command line starts quickly.

FILE = "history.jsonl"
KINDS = ("train", "eval")


class HistoryError(Exception):
    """A run without a history that can be read."""


@dataclass(frozen=True)
class Entry:
    """One report. `values` are finite numbers, None where a number was NaN or infinite."""

    kind: str
    step: int
    epoch: int
    samples: float | None
    time: float | None
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class RunHistory:
    """All reports of a run, in the order of steps."""

    name: str
    path: Path
    entries: Sequence[Entry]

    def of(self, kind: str) -> list[Entry]:
        """The reports of one kind."""
        return [entry for entry in self.entries if entry.kind == kind]


def read_runs(paths: Iterable[Path]) -> list[RunHistory]:
    """The runs at these paths, each once, named by the shortest ends of their paths that differ."""
    by_path = {path.resolve(): path for path in paths}
    names = short_names(list(by_path))
    return [
        RunHistory(name, path, read_entries(path)) for name, path in zip(names, by_path.values(), strict=True)
    ]


def read_entries(path: Path) -> list[Entry]:
    """The reports at a path; raises a HistoryError that says what is missing."""
    file = _file_of(path)
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        raise HistoryError(f"{file} cannot be read: {error.strerror}.") from error
    entries = _entries(_json_rows(text) if text.lstrip().startswith("{") else _csv_rows(text))
    if not entries:
        raise HistoryError(
            f"{file} has no reports: expected lines with kind, step and numbers, as in a history or in "
            "the files of JSONLinesLogger and CSVLogger. A run reports every log_every steps."
        )
    return entries


def run_of(name: str, path: Path, rows: Iterable[dict[str, Any]]) -> RunHistory:
    """The run with these reports; rows that are no reports are skipped."""
    return RunHistory(name, path, _entries(rows))


def _entries(rows: Iterable[dict[str, Any]]) -> list[Entry]:
    entries = [entry for row in rows if (entry := _entry(row)) is not None]
    return sorted(entries, key=lambda entry: entry.step)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that differ from each other."""
    longest = max((len(path.parts) for path in paths), default=1)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _file_of(path: Path) -> Path:
    if not path.exists():
        raise HistoryError(f"{path}: there is no such run folder or log file.")
    if not path.is_dir():
        return path
    for folder in (path, path.parent if (path / "manifest.json").exists() else path):
        if (folder / FILE).exists():
            return folder / FILE
    inside = sorted(file.parent for file in path.glob(f"*/{FILE}"))
    hint = f" These folders inside have one: {', '.join(map(str, inside[:5]))}." if inside else ""
    raise HistoryError(
        f"{path} has no {FILE}. A Trainer with checkpoints writes it into its run folder.{hint}"
    )


def _json_rows(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _csv_rows(text: str) -> Iterator[dict[str, Any]]:
    complete = text[: text.rfind("\n") + 1].replace("\0", "")
    for row in csv.DictReader(complete.splitlines()):
        yield {name: value for name, value in row.items() if name and value}


def _entry(row: dict[str, Any]) -> Entry | None:
    step, epoch = _number(row.get("step")), _number(row.get("epoch"))
    if row.get("kind") not in KINDS or step is None:
        return None
    others = {name: value for name, value in row.items() if name not in ("kind", "step", "epoch")}
    samples, time = _number(others.pop("samples", None)), _number(others.pop("time", None))
    values = {name: _number(value) for name, value in others.items()}
    return Entry(row["kind"], int(step), int(epoch or 0), samples, time, values)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


# The charts for the history of runs, and the numbers in them, as JSON for the page.


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
    view = _view("each table", lines, by_line=len(runs) == 1)
    first = [view, total] if len(lines) <= _MANY_TABLES and len(runs) == 1 else [total, view]
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


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<header>
<h1>{heading}</h1>
<div id="controls"></div>
<div id="legend"></div>
</header>
<main>
<noscript><p>The charts need JavaScript. The numbers below do not.</p></noscript>
<div id="charts"></div>
<h2>Last numbers</h2>
<div class="scroll">
{table}
</div>
</main>
<footer>karvan plot · {paths}</footer>
<svg hidden></svg>
<script id="data" type="application/json">{data}</script>
<script>
{script}
</script>
</body>
</html>
"""


def plot_page(runs: Sequence[RunHistory]) -> str:
    """The page of these runs."""
    names = ", ".join(run.name for run in runs)
    return _PAGE.format(
        title=escape(f"karvan: {names}"),
        heading=escape(names if len(runs) == 1 else f"{len(runs)} runs"),
        style=_part("plot_page.css"),
        script=_part("plot_page.js"),
        table=final_numbers(runs),
        paths=escape(", ".join(str(run.path) for run in runs)),
        data=_embedded({"runs": [_run(run) for run in runs], "charts": make_charts(runs)}),
    )


def framed(page: str) -> str:
    """The page within another one, such as a notebook: it scrolls, and takes over light or dark."""
    style = "width: 100%; height: 640px; border: 0; border-radius: 10px"
    return f'<iframe title="charts" style="{style}" srcdoc="{escape(page)}"></iframe>'


def final_numbers(runs: Sequence[RunHistory]) -> str:
    """A table of the last numbers of each run, a column each."""
    rows = [
        ("Step", [f"{run.entries[-1].step:,}" for run in runs]),
        ("Epochs", [f"{run.entries[-1].epoch:,}" for run in runs]),
        ("Samples", [_last_samples(run) for run in runs]),
        ("Duration", [_duration(run) for run in runs]),
    ]
    for kind, word in (("eval", "evaluation"), ("train", "training")):
        for name in value_names(runs):
            kinds = {entry.kind for run in runs for entry in run.entries if name in entry.values}
            label = f"{_label(name)} ({word})" if len(kinds) > 1 else _label(name)
            rows.append((label, [_last(run, kind, name) for run in runs]))
    head = _row("th", ["", *(run.name for run in runs)])
    body = "".join(_row("td", [label, *cells]) for label, cells in rows if any(cells))
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _embedded(data: object) -> str:
    """JSON that cannot end its script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return resources.files("karvan.monitor").joinpath(name).read_text(encoding="utf-8").strip()


def _row(tag: str, cells: Iterable[str]) -> str:
    first, *others = cells
    return f"<tr><th>{escape(first)}</th>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in others)}</tr>"


def _label(name: str) -> str:
    titles = {"samples_per_second": "Samples/s", "rows": "Table rows", "memory": "Memory, GiB"}
    if name.startswith("rows/"):
        return f"Rows of {name.removeprefix('rows/')}"
    if name.startswith("lr/"):
        return f"Learning rate, {name.removeprefix('lr/')}"
    return titles.get(name, title_of(name))


def _last(run: RunHistory, kind: str, name: str) -> str:
    values = [value for entry in run.of(kind) if (value := entry.values.get(name)) is not None]
    if not values:
        return ""
    if name == "memory":
        return f"{values[-1] / 2**30:.2f}"
    if name == "samples_per_second" or name == "rows" or name.startswith("rows/"):
        return f"{values[-1]:,.0f}"
    return f"{values[-1]:.5g}"


def _last_samples(run: RunHistory) -> str:
    samples = [entry.samples for entry in run.entries if entry.samples is not None]
    return f"{samples[-1]:,.0f}" if samples else ""


def _duration(run: RunHistory) -> str:
    times = [entry.time for entry in run.entries if entry.time is not None]
    if not times:
        return ""
    minutes, seconds = divmod(round(max(times) - min(times)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
