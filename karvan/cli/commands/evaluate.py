"""`karvan evaluate`: losses and metrics of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import typer

from karvan.cli.config.target import Target, pairs
from karvan.cli.errors import OK, CommandError
from karvan.cli.output import (
    JSON_PATH,
    CountedBatches,
    number_text,
    print_table,
    progress,
    write_json,
)


def evaluate(
    target: Path = typer.Argument(
        metavar="FILE.py|CONFIG.yaml", help="What was trained.", show_default=False
    ),
    checkpoint: str | None = typer.Option(
        None,
        metavar="PATH",
        help="A checkpoint, or a run's folder: its newest. By default the job's own folder.",
    ),
    data: str | None = typer.Option(
        None, help="Other files to evaluate on: data.eval of a config, the parameter eval_data of a job()."
    ),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="As for train."),
    device: str | None = typer.Option(None, help="cpu, cuda, cuda:1, …"),
    json_path: str | None = JSON_PATH,
) -> int:
    """Compute the metrics of a checkpoint on evaluation data.

    \b
    Examples:
      karvan evaluate my.yaml --checkpoint out/run
      karvan evaluate my.yaml --data 'clicks/day=8/*.parquet'
      karvan evaluate job.py --checkpoint out/run --json -
    """
    from karvan.cli.restore_model import restore

    options = {"eval_data": data, "device": device}
    job = Target(target, pairs(settings), {n: text for n, text in options.items() if text is not None}).job(
        training=False
    )
    if job.eval_data is None:
        raise CommandError(
            f"{target} has no data to evaluate on: expected eval_data, or data.eval; or pass --data."
        )
    checkpoint_ = restore(job, checkpoint)
    with progress("Evaluating", "samples") as steps:
        metrics = job.trainer.evaluate(CountedBatches(job.eval_data, steps))
    if not write_json(
        json_path, {"checkpoint": checkpoint_.path, "step": checkpoint_.step, "metrics": metrics}
    ):
        rows = [[name, number_text(value)] for name, value in metrics.items()]
        print_table(
            f"{checkpoint_.path}, step {checkpoint_.step:,}", ["metric", "value"], rows, right=["value"]
        )
    return OK
