"""`karvan predict`: writes the predictions of a checkpoint to a file."""

from __future__ import annotations

from pathlib import Path

import typer

from karvan.cli.config.target import Target, pairs
from karvan.cli.errors import OK, CommandError
from karvan.cli.output import console, progress


def predict(
    target: Path = typer.Argument(
        metavar="FILE.py|CONFIG.yaml", help="What was trained.", show_default=False
    ),
    out: str = typer.Option(..., help="A .parquet or .csv file, or - for CSV on stdout.", show_default=False),
    checkpoint: str | None = typer.Option(
        None,
        metavar="PATH",
        help="A checkpoint, or a run's folder: its newest. By default the job's own folder.",
    ),
    data: str | None = typer.Option(
        None, help="Other files to predict for: data.eval of a config, the parameter eval_data of a job()."
    ),
    columns: str | None = typer.Option(None, metavar="A,B", help="Columns to write beside the predictions."),
    sigmoid: bool = typer.Option(False, help="Probabilities instead of logits."),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="As for train."),
    device: str | None = typer.Option(None, help="cpu, cuda, cuda:1, …"),
) -> int:
    """Write the predictions of a checkpoint to a file.

    The data is the job's evaluation data, or --data.

    The file gets the requested columns, then `prediction`, or a column for each output of a model with
    several. These are the model's outputs, for clicks logits; --sigmoid converts them to probabilities. The
    file appears when it is complete.

    \b
    Examples:
      karvan predict my.yaml --checkpoint out/run --out predictions.parquet
      karvan predict my.yaml --columns user,item --sigmoid --out predictions.csv
      karvan predict my.yaml --data 'new/*.parquet' --out - | head
    """
    from karvan.cli.prediction_tables import open_table, record_batch
    from karvan.cli.restore_model import restore

    options = {"eval_data": data, "device": device}
    target_of = Target(target, pairs(settings), {n: text for n, text in options.items() if text is not None})
    with open_table(out) as table:  # a wrong --out is an error before anything is read
        job = target_of.job(training=False)
        if job.eval_data is None:
            raise CommandError(
                f"{target} has no data to predict for: expected eval_data, or data.eval; or pass --data."
            )
        column_names = (
            list(job.predict_columns)
            if columns is None
            else [c.strip() for c in columns.split(",") if c.strip()]
        )
        restore(job, checkpoint)
        rows = 0
        with progress("Predicting", "rows", quiet=out == "-") as steps:
            for prediction in job.trainer.predict(job.eval_data, column_names):
                batch = record_batch(prediction, sigmoid=sigmoid)
                table.write(batch)
                rows += batch.num_rows
                steps.add(batch.num_rows)
    if out != "-":
        console(stderr=True).print(f"Wrote {rows:,} rows to {out}.", markup=False)
    return OK
