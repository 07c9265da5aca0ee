"""Data of this process: tables of Arrow, frames of pandas and polars, arrays, and rows of iterables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import json
from torch import Tensor

from karvan.data.errors import DataError, located, reason
from karvan.data.identity import fingerprint_table
from karvan.data.source import Part, Split, require_inside
from karvan.ragged import NestedRagged, OptionalRagged, OptionalText, Ragged, as_offsets


class TableSource:
    """The rows of a table, as one part."""

    def __init__(self, table: pa.Table, name: str = "memory") -> None:
        self._table = table.replace_schema_metadata(None)
        self._name = name

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return self._table.schema

    def columns_with_nulls(self) -> frozenset[str]:
        """The columns that lack values."""
        table = self._table
        return frozenset(name for name in table.column_names if table[name].null_count)

    def parts(self) -> list[Part]:
        """One part with the source's name."""
        return [Part(self._name, self._table.num_rows)]

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The rows of a split, without copies."""
        if split.path != self._name:
            raise DataError(f"Expected a split of '{self._name}'.", path=split.path)
        require_inside(split, self._table.num_rows)
        yield from self._table.slice(split.first, split.count).to_batches()

    def fingerprint(self) -> str:
        """A hash of the rows; see `identity.py`."""
        return fingerprint_table(self._table)

    def __repr__(self) -> str:
        return f"TableSource({self._name!r}, {self._table.num_rows} rows, columns {self.schema.names})"


def open_frame(data: Any, name: str = "memory") -> TableSource:
    """Make a source of anything in memory.

    Args:
        data: An Arrow table or record batch; a frame of pandas or polars; or a mapping of names to arrays,
            tensors, `Ragged`s or lists. Matrices become columns of lists, weighted raggeds columns of {id,
            weight}.
        name: What errors call it.

    Returns:
        The source.

    Raises:
        DataError: Columns have different lengths, or are of a kind that cannot be read.

    Example:
        >>> source = kv.data.open_frame({"user": [7, 8]})
        >>> source.parts()
        [Part(path='memory', records=2)]
    """
    return TableSource(_table(data), name)


def _table(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, Mapping):
        return _from_mapping(data)
    if type(data).__name__ == "Series":
        raise TypeError("Expected columns with names, but received a Series: give it {'name': series}.")
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        with located("pandas frame"):
            return _from_pandas(data)
    if hasattr(data, "__arrow_c_stream__"):
        with located(type(data).__name__):
            return pa.table(data)
    raise TypeError(
        "Expected a table, a frame of pandas or polars, or a mapping from names to arrays, "
        f"but received {type(data).__name__}."
    )


def _from_pandas(frame: Any) -> pa.Table:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except OverflowError:  # objects that are integers from 2**63 on
        arrays = []
        for name, column in frame.items():
            with located("pandas frame", column=str(name)):
                is_object = column.dtype == object
                arrays.append(_array(column.to_numpy()) if is_object else pa.Array.from_pandas(column))
        return pa.Table.from_arrays(arrays, names=[str(name) for name in frame.columns])


def _from_mapping(data: Mapping[str, Any]) -> pa.Table:
    arrays: dict[str, pa.Array] = {}
    for name, values in data.items():
        with located(column=name):
            arrays[name] = _array(values)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"All columns need equally many rows, but have: {lengths}.")
    return pa.table(arrays)


def _array(values: Any) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    if isinstance(values, OptionalRagged | OptionalText):
        return nullable(values)
    if isinstance(values, NestedRagged):
        inner = pa.LargeListArray.from_arrays(_array(values.inner), _array(values.values))
        return pa.LargeListArray.from_arrays(_array(values.outer), inner)
    if isinstance(values, Ragged):
        return _ragged(values)
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise DataError(f"Expected an array, a tensor or a list with a value of each sample, got {values!r}.")
    if isinstance(values, np.ndarray) and values.ndim > 1:
        if values.ndim > 2:
            raise ValueError(f"Arrays may have one or two dimensions, but this has shape {values.shape}.")
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    try:
        if isinstance(values, np.ndarray) and values.dtype.kind == "O":
            return pa.array(values, from_pandas=True)  # among objects NaN is a missing value
        try:
            return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):  # NaN among the strings of a list
            return pa.array(values, from_pandas=True)
    except OverflowError:
        return _unsigned(values)


def _unsigned(values: Any) -> pa.Array:
    """Ids that are too large for int64, or lists of them."""
    type_ = pa.uint64()
    for _ in range(3):
        try:
            return pa.array(values, type_, from_pandas=True)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            type_ = pa.list_(type_)
    raise DataError(
        "Expected 64-bit integers, from 0 to 2**64 - 1 or from -2**63 to 2**63 - 1, but received some that "
        "are larger, or large ones together with negative ones or other values."
    )


def nullable(entry: OptionalRagged | OptionalText) -> pa.Array:
    """One number or string for each row, with null for those that are missing."""
    if isinstance(entry, OptionalText):
        texts = [bytes(text).decode(errors="replace") for text in entry.lists().to_lists()]
        values, offsets = pa.array(texts, pa.string()), entry.outer
    else:
        values, offsets = pa.array(entry.values.cpu().numpy()), as_offsets(entry)
    first, missing = offsets[:-1].cpu(), (offsets.diff() == 0).cpu()
    return values.take(pa.array(first.numpy(), mask=missing.numpy()))


def _ragged(values: Ragged) -> pa.Array:
    leaf = _array(values.values)
    if values.weights is not None:
        leaf = pa.StructArray.from_arrays([leaf, _array(values.weights)], names=["id", "weight"])
    offsets = np.arange(len(leaf) + 1) if values.offsets is None else values.offsets
    return pa.LargeListArray.from_arrays(_array(offsets), leaf)


# Record batches from Python iterables, which can be read once.
#
# A stream has no parts and no splits, so it is not a `Source`: it is an iterator of record batches, and a
# decoder turns these into batches.
#
#     batches = map(Decoder(columns), record_batches(rows, size=4096))

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
