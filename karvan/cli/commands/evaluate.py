"""`karvan evaluate` and `karvan predict`: the metrics of a checkpoint, and its predictions in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from karvan.cli.output import (
    JSON_PATH,
    OK,
    CommandError,
    CountedBatches,
    console,
    number_text,
    print_table,
    progress,
    refusing,
    write_json,
)
from karvan.cli.target import DEVICE, SETTINGS, TRAINED, Target, target_of
from karvan.files import replacing

if TYPE_CHECKING:
    import pyarrow as pa

    import karvan as kv

_CHECKPOINT = Option(
    None, metavar="PATH", help="A checkpoint, or a run's folder: its newest. By default the job's own folder."
)


def evaluate(
    target: Path = TRAINED,
    checkpoint: str | None = _CHECKPOINT,
    data: str | None = Option(
        None, help="Other files to evaluate on: data.eval of a config, the parameter eval_data of a job()."
    ),
    settings: list[str] = SETTINGS,
    device: str | None = DEVICE,
    json_path: str | None = JSON_PATH,
) -> int:
    """Compute the metrics of a checkpoint on evaluation data.

    \b
    Examples:
      karvan evaluate my.yaml --checkpoint out/run
      karvan evaluate my.yaml --data 'clicks/day=8/*.parquet'
      karvan evaluate job.py --checkpoint out/run --json -
    """
    job = _job(target_of(target, settings, eval_data=data, device=device), "evaluate on")
    saved = _restore(job, checkpoint)
    with progress("Evaluating", "samples") as steps:
        metrics = job.trainer.evaluate(CountedBatches(job.eval_data or (), steps))
    if not write_json(json_path, {"checkpoint": saved.path, "step": saved.step, "metrics": metrics}):
        rows = [[name, number_text(value)] for name, value in metrics.items()]
        print_table(f"{saved.path}, step {saved.step:,}", ["metric", "value"], rows, right=["value"])
    return OK


def predict(
    target: Path = TRAINED,
    out: str = Option(..., help="A .parquet or .csv file, or - for CSV on stdout."),
    checkpoint: str | None = _CHECKPOINT,
    data: str | None = Option(
        None, help="Other files to predict for: data.eval of a config, the parameter eval_data of a job()."
    ),
    columns: str | None = Option(None, metavar="A,B", help="Columns to write beside the predictions."),
    sigmoid: bool = Option(False, help="Probabilities instead of logits."),
    settings: list[str] = SETTINGS,
    device: str | None = DEVICE,
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
    from karvan.train.evaluation import record_batch

    trained = target_of(target, settings, eval_data=data, device=device)
    with _open_table(out) as table:  # a wrong --out is an error before anything is read
        job = _job(trained, "predict for")
        names = list(job.predict_columns)
        if columns is not None:
            names = [name.strip() for name in columns.split(",") if name.strip()]
        _restore(job, checkpoint)
        rows = 0
        with progress("Predicting", "rows", quiet=out == "-") as steps:
            for prediction in job.trainer.predict(job.eval_data or (), names):
                with refusing(ValueError):
                    batch = record_batch(prediction, sigmoid=sigmoid)
                table.write(batch)
                rows += batch.num_rows
                steps.add(batch.num_rows)
    if out != "-":
        console(stderr=True).print(f"Wrote {rows:,} rows to {out}.", markup=False)
    return OK


def _job(target: Target, purpose: str) -> kv.TrainingJob:
    """The job of a target, which must have evaluation data."""
    job = target.job(training=False)
    if job.eval_data is None:
        raise CommandError(
            f"{target.path} has no data to {purpose}: expected eval_data, or data.eval; or pass --data."
        )
    return job


def _restore(job: kv.TrainingJob, path: str | None) -> kv.checkpoint.Checkpoint:
    """Load a checkpoint, or the newest one of a run's folder, into a job's model and its data's transform.

    Without a path it is that of the job's own run.
    """
    from karvan.checkpoint import CheckpointError, find
    from karvan.train.dataset import Transforms

    folder = path if path is not None else job.trainer.saver.folder
    if folder is None:
        raise CommandError("The job has no folder of checkpoints: name the one to load with --checkpoint.")
    checkpoint = find(folder)
    state = checkpoint.load(job.trainer.model)
    if "model" not in state:
        raise CheckpointError.mismatch(
            checkpoint.path, "a model, as a Trainer saves it", ", ".join(state) or "nothing"
        )
    try:
        job.trainer.model.load_state_dict(state["model"])
    except RuntimeError as error:  # torch's text has a line for each tensor; the first ones are enough
        lines = [line.strip() for line in str(error).splitlines()[1:3]]
        raise CheckpointError(
            checkpoint.path, f"its model is another than the job's: {' '.join(lines)}"
        ) from error
    _restore_transform(job.eval_data, checkpoint, state)
    Transforms(job.eval_data).require_columns(state)
    return checkpoint


def _restore_transform(data: Any, checkpoint: kv.checkpoint.Checkpoint, state: Mapping[str, Any]) -> None:
    from karvan.checkpoint.checkpoint import KEY, has_state, load_transforms, name_of

    transform = getattr(data, "transform", None)
    unfitted = getattr(transform, "unfitted", ())
    if has_state(transform) and (unfitted or name_of(transform) in state.get(KEY, {})):
        load_transforms(checkpoint.path, state, transform)


class _TableFile:
    """Writes record batches of one schema, that of the first one."""

    def __init__(self, kind: str, sink: Any) -> None:
        self._kind = kind
        self._sink = sink
        self._writer: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        if self._writer is None:
            import pyarrow as pa
            import pyarrow.csv
            import pyarrow.parquet

            lists = [field.name for field in batch.schema if pa.types.is_nested(field.type)]
            if self._kind == "csv" and lists:
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
def _open_table(out: str) -> Iterator[_TableFile]:
    """A table to write to; the file appears when the block ends without an error, or not at all."""
    if out == "-":
        import pyarrow as pa

        sys.stdout.flush()
        table = _TableFile("csv", pa.PythonFile(sys.stdout.buffer, "w"))
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
        table = _TableFile(path.suffix[1:], file)
        yield table
        table.close()
