"""`write_predictions`: a Parquet file for each batch of predictions, which appears when it is complete.

In a job whose trainers lease the records, files have the numbers of batches. A batch that is predicted again,
because its trainer died before it had asked for the next one, replaces its file by one with the same content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from karvan import distributed
from karvan.data.in_memory import nullable
from karvan.files import replacing
from karvan.ragged import NestedRagged, OptionalRagged, OptionalText, Ragged
from karvan.train.types import Prediction


def write_predictions(
    predictions: Iterable[Prediction], folder: str | os.PathLike[str], *, sigmoid: bool = False
) -> int:
    """Write what `Trainer.predict` yields into a folder, one Parquet file for each batch.

    A file has the requested columns, then `prediction`, or a column for each output of a model with several.
    It is named part-00000012.parquet by the number of its batch, or rank-00000-00000012.parquet by rank and
    number where records are not leased. Each file is complete or absent.

    Args:
        predictions: The iterator of `Trainer.predict`.
        folder: Where the files are written; it is created if necessary.
        sigmoid: Whether to write probabilities instead of logits.

    Returns:
        How many rows this process has written.

    Raises:
        ValueError: A column has the name of an output, or is of a kind that cannot be written.

    Example:
        >>> users = {"user": torch.tensor([7, 8])}
        >>> predictions = [kv.train.Prediction(torch.zeros(2), users)]
        >>> kv.train.write_predictions(predictions, "predictions", sigmoid=True)
        2
    """
    into = Path(folder)
    into.mkdir(parents=True, exist_ok=True)
    rank, rows = distributed.current().rank, 0
    for place, prediction in enumerate(predictions):
        records = prediction.records
        name = f"rank-{rank:05d}-{place:08d}" if records is None else f"part-{records.number:08d}"
        batch = record_batch(prediction, sigmoid=sigmoid)
        with replacing(into / f"{name}.parquet") as file:
            pq.write_table(pa.Table.from_batches([batch]), file)
        rows += batch.num_rows
    return rows


def record_batch(prediction: Prediction, *, sigmoid: bool = False) -> pa.RecordBatch:
    """The columns of a batch, followed by the model's outputs."""
    output = prediction.output
    outputs = dict(output) if isinstance(output, Mapping) else {"prediction": output}
    if both := outputs.keys() & prediction.columns.keys():
        raise ValueError(
            f"The model has an output '{min(both)}', so there cannot be a column of that name as well."
        )
    arrays = {name: _array(name, column) for name, column in prediction.columns.items()}
    arrays |= {name: _array(name, _numbers(values, sigmoid)) for name, values in outputs.items()}
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
    raise ValueError(
        f"Column '{name}' cannot be written: expected numbers, lists or text, got {type(column).__name__}."
    )
