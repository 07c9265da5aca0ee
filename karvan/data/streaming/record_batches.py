"""Record batches from Python iterables, which can be read once.

A stream has no parts and no splits, so it is not a `Source`: it is an iterator of record batches, and a
decoder turns these into batches.

    batches = map(Decoder(columns), record_batches(rows, size=4096))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
from pyarrow import json

from karvan.data.errors import DataError, reason

# Turns messages of a stream, or byte records of a file, into the same number of rows.
DecodeBytes = Callable[[list[bytes]], pa.RecordBatch]
BYTES_SCHEMA = pa.schema([("record", pa.binary())])


def bytes_rows(records: list[bytes]) -> pa.RecordBatch:
    """Records as they are, in the one column `record`."""
    return pa.record_batch([pa.array(records, pa.binary())], schema=BYTES_SCHEMA)


def json_rows(schema: pa.Schema) -> DecodeBytes:
    """Make a function that reads each record as a JSON object.

    Args:
        schema: The columns. Other columns in a record are an error.

    Returns:
        A function that makes a record batch of a list of bytes, for `KafkaReader`.

    Example:
        >>> import pyarrow as pa
        >>> decode = kv.data.json_rows(pa.schema({"user": pa.int64()}))
        >>> decode([b'{"user": 7}', b'{"user": 8}']).to_pydict()
        {'user': [7, 8]}
    """
    return _JsonRows(schema)


class _JsonRows:
    """What `json_rows` gives; it can be pickled, for worker processes."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")

    def __reduce__(self) -> tuple[Any, ...]:
        return _JsonRows, (self._schema,)  # the options cannot be pickled

    def __call__(self, records: list[bytes]) -> pa.RecordBatch:
        names = self._schema.names
        if not records:
            return pa.RecordBatch.from_pylist([], self._schema)
        # Within JSON a line end can only be between tokens, where a space means the same.
        lines = b"\n".join(record.replace(b"\n", b" ").replace(b"\r", b" ") for record in records)
        try:
            reading = json.ReadOptions(block_size=len(lines) + 1, use_threads=False)
            table = json.read_json(pa.BufferReader(lines), reading, self._options).select(names)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"Expected JSON objects with {', '.join(names)}: {reason(error)}") from error
        if table.num_rows != len(records):
            raise DataError(
                f"Expected one JSON object in each of {len(records)} records, but there are {table.num_rows}."
            )
        return table.combine_chunks().to_batches()[0]


def record_batches(
    rows: Iterable[Mapping[str, Any]], size: int, schema: pa.Schema | None = None
) -> Iterator[pa.RecordBatch]:
    """Collect rows, as dicts, into record batches.

    A row that lacks a column has null there. A column that the schema does not have is an error, since it
    would be lost.

    Args:
        rows: The rows.
        size: How many rows make a batch; the last one may be smaller.
        schema: The columns; by default those of the first batch. A column with only nulls there takes its
            type from the first batch with a value.

    Returns:
        An iterator of record batches.

    Raises:
        ValueError: `size` is below 1.
        DataError: A row does not fit the schema.

    Example:
        >>> rows = ({"user": user} for user in [7, 8, 9])
        >>> [batch.num_rows for batch in kv.data.record_batches(rows, size=2)]
        [2, 1]
    """
    if size < 1:
        raise ValueError(f"A batch needs a size of at least 1, but it is {size}.")
    source = iter(rows)
    done = 0
    has_schema = schema is not None
    while chunk := list(islice(source, size)):
        batch = _batch(chunk, schema, done, has_schema)
        schema = batch.schema
        done += len(chunk)
        yield batch


def _batch(
    chunk: list[Mapping[str, Any]], schema: pa.Schema | None, done: int, has_schema: bool
) -> pa.RecordBatch:
    for number, row in enumerate(chunk, done):
        if not isinstance(row, Mapping):
            raise DataError(f"Expected a dict, but it is a {type(row).__name__}.", place=f"record {number}")
    names = list(dict.fromkeys(name for row in chunk for name in row)) if schema is None else schema.names
    unique = set(names)
    arrays = []
    for name in names:
        type_ = None if schema is None else schema.field(name).type
        if type_ == pa.null() and not has_schema:
            type_ = None
        try:
            arrays.append(pa.array([row.get(name) for row in chunk], type_))
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(
                reason(error), place=f"records {done} to {done + len(chunk)}", column=name
            ) from error
    for number, row in enumerate(chunk, done):
        if not row.keys() <= unique:
            extra = sorted(row.keys() - unique)[0]
            raise DataError(
                f"The record has a column that is not among: {', '.join(names)}.",
                place=f"record {number}",
                column=extra,
            )
    if not has_schema:
        schema = pa.schema([(name, array.type) for name, array in zip(names, arrays, strict=True)])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
