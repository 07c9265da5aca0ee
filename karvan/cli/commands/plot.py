"""`karvan plot`: the numbers of one or more runs as charts in an HTML file."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from typer import Argument, Option

from karvan.cli.output import DAMAGED, OK, CommandError, console, folder_of, refusing
from karvan.files import replace_file
from karvan.job.checkpoint_url import shown, url_of


def plot(
    runs: list[str] = Argument(metavar="RUN...", help="Run folders, or log files (CSV or JSON lines)."),
    output: Path | None = Option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="The page to write; by default plot.html in the first run's folder.",
    ),
    open_page: bool = Option(False, "--open", help="Open the page in a browser."),
) -> int:
    """Draw the loss and metrics of runs as charts in an HTML file.

    Other charts are of learning rates, throughput and table sizes.

    A Trainer with checkpoints writes its numbers to history.jsonl in its run folder. The page overlays all
    runs. It works without a network, and while the run is still training: run the command again for newer
    numbers.

    \b
    Examples:
      karvan plot out/run
      karvan plot out/run out/other -o compare.html
      karvan plot log.csv --open
    """
    from karvan.monitor.plot_page import HistoryError, plot_page, read_runs

    folders = [_history_of(run) for run in runs]
    with refusing(HistoryError, code=DAMAGED):
        histories = read_runs(folders)
    target = output or _beside(folders[0])
    _write(target, plot_page(histories))
    reports = sum(len(run.entries) for run in histories)
    console().print(
        f"{target}: {len(histories)} run{'s' * (len(histories) > 1)}, {reports:,} reports.", markup=False
    )
    if open_page:
        webbrowser.open(target.resolve().as_uri())
    return OK


def _history_of(run: str) -> Path:
    """The path of a run; the history at a URL is downloaded."""
    path = folder_of(run)
    if url_of(path) is None:
        return path
    from karvan.checkpoint.files import explained, fetch
    from karvan.checkpoint.survey import is_step_name
    from karvan.monitor.plot_page import FILE

    folder = path.parent if is_step_name(path.name) else path
    with explained(folder):
        fetch(folder / FILE)
    if not (folder / FILE).exists():
        raise CommandError(f"{shown(folder)} has no {FILE}. It is saved with each checkpoint.", DAMAGED)
    return folder


def _beside(run: Path) -> Path:
    if url_of(run) is not None:
        return Path("plot.html")
    if not run.is_dir():
        return run.with_suffix(".html")
    return (run.parent if (run / "manifest.json").exists() else run) / "plot.html"


def _write(target: Path, page: str) -> None:
    """Replace the file at once, so that a browser never reads half a page."""
    try:
        replace_file(target, page)
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror}.") from error
