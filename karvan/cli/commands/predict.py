"""`karvan predict`: writes the predictions of a checkpoint to a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import typer

from karvan.cli.config.target import Target, pairs
from karvan.cli.errors import OK, CommandError
from karvan.cli.output import console, progress
from karvan.files import replacing
from karvan.train import Prediction, prediction_files

# Tables of predictions: Parquet and CSV files that appear when complete, or CSV on stdout.


class TableFile:
    """Writes record batches of one schema, that of the first one."""

    def __init__(self, kind: str, sink: Any) -> None:
        self._kind = kind
        self._sink = sink
        self._writer: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        if self._writer is None:
            if self._kind == "csv" and (
                lists := [f.name for f in batch.schema if pa.types.is_nested(f.type)]
            ):
                raise CommandError(
                    f"CSV has no lists, but column '{lists[0]}' is one; write a .parquet file."
                )
            make = pyarrow.csv.CSVWriter if self._kind == "csv" else pyarrow.parquet.ParquetWriter
            self._writer = make(self._sink, batch.schema)
        self._writer.write_batch(batch)

    def close(self) -> None:
        """Finish the table."""
        if self._writer is None:
            raise CommandError("There is nothing to predict: the data has no samples.")
        self._writer.close()


@contextmanager
def open_table(out: str) -> Iterator[TableFile]:
    """A table to write to; the file appears when the block ends without an error, or not at all."""
    if out == "-":
        sys.stdout.flush()
        table = TableFile("csv", pa.PythonFile(sys.stdout.buffer, "w"))
        yield table
        table.close()
        sys.stdout.flush()
        return
    path = Path(out)
    if path.suffix not in (".parquet", ".csv"):
        raise CommandError(f"--out expects a .parquet or .csv file, or -, got '{out}'.")
    if not path.parent.is_dir():
        raise CommandError(f"--out expects a folder that exists, got '{path.parent}'.")
    with replacing(path) as file:
        table = TableFile(path.suffix[1:], file)
        yield table
        table.close()


def record_batch(prediction: Prediction, *, sigmoid: bool = False) -> pa.RecordBatch:
    """The columns of a batch, followed by the model's outputs."""
    try:
        return prediction_files.record_batch(prediction, sigmoid=sigmoid)
    except ValueError as error:
        raise CommandError(str(error)) from None


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
