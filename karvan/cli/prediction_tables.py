"""Tables of predictions: Parquet and CSV files that appear when complete, or CSV on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from karvan.cli.errors import CommandError
from karvan.files import replacing
from karvan.train import Prediction, evaluation


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
        return evaluation.record_batch(prediction, sigmoid=sigmoid)
    except ValueError as error:
        raise CommandError(str(error)) from None
