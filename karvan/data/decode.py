"""`Decoder`: record batches of Arrow as `Batch`es of tensors, by declared columns.

Tensors share memory with the records where their layouts agree, which costs nothing: change a copy of them,
not themselves. What each column may hold and becomes is told in `columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pyarrow as pa
import torch
from torch import Tensor

from karvan.data import arrays
from karvan.data.columns import Column, Fixed, Raw, Varlen, is_number, is_text, is_weighted, unnest
from karvan.data.errors import DataError, reason
from karvan.ragged import Batch, Entry, NestedRagged, Ragged

_Read = Callable[[pa.Array], Entry]


class Decoder:
    """Call it with a record batch to get a `Batch` of the declared columns, in their order."""

    row_wise: ClassVar[bool] = True
    """What becomes of a record does not depend on those next to it."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        names = [column.name for column in self.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError("The column is declared twice.", column=twice[0])
        self._plan: tuple[pa.Schema, list[tuple[str, int, _Read]]] | None = None

    @property
    def names(self) -> list[str]:
        """The columns that records must have."""
        return [column.name for column in self.columns]

    def check(self, schema: pa.Schema) -> None:
        """Raise `DataError` unless records of this schema have all columns, of types that can be read."""
        _plan(self.columns, schema)

    def __call__(self, records: pa.RecordBatch) -> Batch:
        """The batch of these records."""
        plan = self._plan
        if plan is None or not (plan[0] is records.schema or plan[0].equals(records.schema)):
            plan = self._plan = records.schema, _plan(self.columns, records.schema)
        entries: dict[str, Entry] = {}
        name = None
        try:
            for name, place, read in plan[1]:
                entries[name] = read(records.column(place))
        except pa.ArrowException as error:
            raise DataError(reason(error), column=name) from error
        return Batch(entries)

    def __repr__(self) -> str:
        return f"Decoder({list(self.columns)})"


def _plan(columns: Sequence[Column], schema: pa.Schema) -> list[tuple[str, int, _Read]]:
    plan = []
    for column in columns:
        places = schema.get_all_field_indices(column.name)
        if len(places) != 1:
            what = "missing" if not places else f"there {len(places)} times"
            has = ", ".join(schema.names) or "none"
            raise DataError(f"The column is {what}. The records' columns are: {has}.", column=column.name)
        plan.append((column.name, places[0], _reader(column, schema.field(places[0]).type)))
    return plan


def _reader(column: Column, type_: pa.DataType) -> _Read:
    if isinstance(column, Fixed):
        return _fixed(column, type_)
    if isinstance(column, Raw):
        return _raw(column, type_)
    return _varlen(column, type_)


def _fixed(column: Fixed, type_: pa.DataType) -> _Read:
    levels, leaf = unnest(type_)
    if not is_number(leaf) or levels > 1 or (levels == 0 and column.length != 1):
        asked = "numbers" if column.length == 1 else f"lists of {column.length} numbers"
        raise _wrong(column, asked, type_, " or declare a Raw, or a Varlen with a hash" * is_text(leaf))
    defaults = column.defaults()
    if levels == 0 and column.dtype is None:
        return arrays.number_reader(type_, defaults[0])

    def read(array: pa.Array) -> Tensor:
        if levels == 0:
            tensor = arrays.numbers(array, defaults[0])
        else:
            tensor = arrays.of_length(array, column.length, defaults, column.name)
            tensor = tensor[:, 0] if column.length == 1 else tensor
        return tensor if column.dtype is None else tensor.to(column.dtype)

    if column.dtype is torch.float64 and pa.types.is_float64(type_):
        filled = pa.scalar(float(defaults[0]), type_)
        return lambda array: arrays.dense(array.fill_null(filled) if array.null_count else array)
    return read


def _raw(column: Raw, type_: pa.DataType) -> _Read:
    levels, leaf = unnest(type_)
    if not is_text(leaf) or levels > 1:
        raise _wrong(column, "strings or lists of strings", type_)

    def nested(array: pa.Array) -> NestedRagged:
        outer, strings = arrays.peel(array)
        rows = arrays.texts(strings)
        assert rows.offsets is not None
        return NestedRagged(rows.values, rows.offsets, outer)

    return nested if levels else arrays.texts


def _varlen(column: Varlen, type_: pa.DataType) -> _Read:
    levels, leaf = unnest(type_)
    weighted = is_weighted(leaf)
    key = leaf.field(0).type if weighted else leaf
    if is_text(key) and column.hash is None:
        raise _wrong(column, "numbers", type_, ' or declare hash="farm" or "murmur", or a Raw')
    if is_number(key) and column.hash is not None:
        raise _wrong(column, "strings to hash", type_)
    if not (is_text(key) or is_number(key)) or levels > (1 if weighted else 2):
        raise _wrong(column, "numbers, strings, lists of them or {id: weight}", type_)

    def values(array: pa.Array) -> Tensor:
        if column.hash is None:
            return arrays.numbers(array)
        return arrays.hashed(array, column.hash, column.bucket)

    def read(array: pa.Array) -> Entry:
        bounds: list[Tensor] = []
        for _ in range(levels):
            offsets, array = arrays.peel(array)
            bounds.append(offsets)
        if levels == 0:
            bounds.append(_one_each(array))
            array = array.drop_null()
        if levels == 2:
            return NestedRagged(values(array), bounds[1], bounds[0])
        if not weighted:
            return Ragged(values(array), bounds[0])
        pairs = array.flatten()  # unlike field(), this gives a null struct null fields
        return Ragged(values(pairs[0]), bounds[0], arrays.weights(pairs[1]))

    return read


def _one_each(array: pa.Array) -> Tensor:
    if not array.null_count:
        return torch.arange(len(array) + 1)
    offsets = torch.zeros(len(array) + 1, dtype=torch.int64)
    torch.cumsum(arrays.numbers(array.is_valid()), 0, out=offsets[1:])
    return offsets


def _wrong(column: Column, expected: str, type_: pa.DataType, otherwise: str = "") -> DataError:
    kind = type(column).__name__
    hint = f" Change the data{otherwise}." if otherwise else ""
    return DataError(
        f"{kind} expects {expected}, but the column's type is {type_}.{hint}", column=column.name
    )
