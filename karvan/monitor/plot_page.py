"""`plot_page`: one HTML file with the charts of some runs.

Style and script are in the page, and its content security policy forbids every request, so it can be mailed
or stored with a run. All text that comes from a run is escaped here, or set as text by the script.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from karvan.monitor.charts import page_data, title_of, value_names
from karvan.monitor.run_history import RunHistory

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
        data=_embedded(page_data(runs)),
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
            label = f"{_label(name)} ({word})" if _in_both(runs, name) else _label(name)
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


def _in_both(runs: Sequence[RunHistory], name: str) -> bool:
    kinds = {entry.kind for run in runs for entry in run.entries if name in entry.values}
    return len(kinds) > 1


def _label(name: str) -> str:
    known = {"samples_per_second": "Samples/s", "rows": "Table rows", "memory": "Memory, GiB"}
    if name.startswith("rows/"):
        return f"Rows of {name.removeprefix('rows/')}"
    if name.startswith("lr/"):
        return f"Learning rate, {name.removeprefix('lr/')}"
    return known.get(name, title_of(name))


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
