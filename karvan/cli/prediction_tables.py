"""Tables of predictions: Parquet and CSV files that appear when complete, or CSV on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor

from karvan.cli.errors import CommandError
from karvan.data.in_memory import nullable
from karvan.ragged import NestedRagged, OptionalRagged, OptionalText, Ragged
from karvan.train import Prediction


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
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            table = TableFile(path.suffix[1:], file)
            yield table
            table.close()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def record_batch(prediction: Prediction, *, sigmoid: bool = False) -> pa.RecordBatch:
    """The columns of a batch, followed by the model's outputs."""
    output = prediction.output
    outputs = dict(output) if isinstance(output, Mapping) else {"prediction": output}
    if both := outputs.keys() & prediction.columns.keys():
        raise CommandError(
            f"The model has an output '{min(both)}', so there cannot be a column of that name as well."
        )
    arrays = {name: _array(name, column) for name, column in prediction.columns.items()}
    arrays |= {name: _array(name, _numbers(each, sigmoid)) for name, each in outputs.items()}
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _numbers(output: Tensor, sigmoid: bool) -> Tensor:
    output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    return output.sigmoid() if sigmoid else output


def _array(name: str, column: Any) -> pa.Array:
    if isinstance(column, Tensor):
        if column.dim() <= 1:
            return pa.array(column.numpy())
        flat = pa.array(column.reshape(-1).numpy())
        return pa.FixedSizeListArray.from_arrays(flat, column[0].numel() if len(column) else 1)
    if isinstance(column, OptionalRagged | OptionalText):
        return nullable(column)
    if isinstance(column, Ragged):
        if column.offsets is None:
            return _array(name, column.values)
        if column.values.dtype == torch.uint8:  # text
            return pa.array([bytes(row).decode(errors="replace") for row in column.to_lists()])
        offsets = pa.array(column.offsets.numpy(), pa.int64())
        return pa.LargeListArray.from_arrays(offsets, pa.array(column.values.numpy()))
    if isinstance(column, NestedRagged):
        return pa.array(column.to_lists())
    raise CommandError(
        f"Column '{name}' cannot be written: expected numbers, lists or text, got {type(column).__name__}."
    )
