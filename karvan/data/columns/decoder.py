"""`Decoder`: record batches of Arrow as `Batch`es of tensors, by declared columns.

Tensors share memory with the records where their layouts match, which costs nothing: modify a copy, not the
tensors themselves. `declarations.py` describes what each column may hold and becomes, and missing values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar

import pyarrow as pa
import torch
from pyarrow import types
from torch import Tensor

from karvan.data.columns import arrow_to_torch
from karvan.data.columns.arrow_to_torch import check_defaults, whole_numbers
from karvan.data.columns.declarations import (
    Column,
    Fixed,
    Raw,
    Varlen,
    is_list,
    is_number,
    is_text,
    is_weighted,
    unnest,
)
from karvan.data.columns.missing_values import MISSING_WEIGHT, first_missing, missing_in_list, missing_value
from karvan.data.errors import DataError, reason
from karvan.ragged import Batch, Entry, NestedRagged, OptionalText, Ragged

# Structs as columns: the fields of a struct `a` are the columns `a.b` and `a.c`, at any depth.
#
# A pair of an id and its weight stays one column, which `Varlen` reads, and so does a struct with a field
# whose name is that of a column. A field of a missing struct is missing.


def flat_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of records with this schema."""
    if not has_structs(schema):
        return schema
    return pa.schema([pa.field(name, type_) for name, type_, _ in _leaves(schema)])


def flat_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Records with the columns of `flat_schema`."""
    arrays, names = [], []
    for name, _, path in _leaves(batch.schema):
        array = batch.column(path[0])
        for index in path[1:]:
            array = array.flatten()[index]  # unlike field(), null where the struct is
        arrays.append(array)
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def has_structs(schema: pa.Schema) -> bool:
    """Whether columns of records with this schema are structs that have columns in place of fields."""
    return any(_is_split(field.type) for field in schema)


def outer_names(schema: pa.Schema, names: Sequence[str]) -> list[str]:
    """The columns of a schema that have these columns, or structs with them."""
    outer = {name: schema.names[path[0]] for name, _, path in _leaves(schema)}
    return list(dict.fromkeys(outer.get(name, name) for name in names))


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType, tuple[int, ...]]]:
    """Each column: its name, its type and where it is."""
    for index, field in enumerate(schema):
        below = list(_below(field, (index,)))
        if _is_split(field.type) and any(name in schema.names for name, _, _ in below):
            below = [(field.name, field.type, (index,))]
        yield from below


def _below(field: pa.Field, path: tuple[int, ...]) -> Iterator[tuple[str, pa.DataType, tuple[int, ...]]]:
    if not _is_split(field.type):
        yield field.name, field.type, path
        return
    for index in range(field.type.num_fields):
        inner = field.type.field(index)
        yield from _below(pa.field(f"{field.name}.{inner.name}", inner.type), (*path, index))


def _is_split(type_: pa.DataType) -> bool:
    return bool(types.is_struct(type_)) and type_.num_fields > 0 and not is_weighted(type_)


_Read = Callable[[pa.Array], Entry]


class Decoder:
    """Turn record batches into a `Batch` of declared columns, in their order.

    Call it with a record batch.

    Args:
        columns: The columns, as `Fixed`, `Varlen` or `Raw`.
        labels: Columns in which a missing value, or NaN, is an error.
        nullable: Columns that are known to lack values; they have one kind in all batches.

    Raises:
        DataError: A column is declared twice, or a label is not among them.
        TypeError: A column is not declared.

    Example:
        >>> import pyarrow as pa
        >>> decode = kv.data.Decoder([kv.data.Fixed("user")])
        >>> decode(pa.record_batch({"user": [7, 8]}))["user"]
        tensor([7, 8])
    """

    row_wise: ClassVar[bool] = True
    """What becomes of a record does not depend on those next to it."""

    def __init__(
        self, columns: Sequence[Column], labels: Sequence[str] = (), nullable: Collection[str] = ()
    ) -> None:
        self.columns = tuple(columns)
        self.labels = tuple(labels)
        if wrong := [column for column in self.columns if not isinstance(column, Fixed | Varlen | Raw)]:
            raise TypeError(
                f"Decoder expects columns, kv.data.Fixed, Varlen or Raw, got {wrong[0]!r}. By their types: "
                "kv.data.infer(schema)."
            )
        without_default = [
            column for column in columns if not isinstance(column, Varlen) and column.default is None
        ]
        self.nullable = tuple(column.name for column in without_default if column.name in nullable)
        names = [column.name for column in self.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError("The column is declared twice.", column=twice[0])
        if unknown := [name for name in self.labels if name not in names]:
            raise DataError(
                f"Labels must be columns that are read. The columns are: {', '.join(names)}.",
                column=unknown[0],
            )
        self._plan: tuple[pa.Schema, list[tuple[str, int, _Read]]] | None = None
        self._has_structs: bool | None = None  # whether records have structs whose fields are columns

    @property
    def names(self) -> list[str]:
        """The columns that records must have."""
        return [column.name for column in self.columns]

    def check(self, schema: pa.Schema) -> None:
        """Check that records of a schema have all columns, of types that can be read.

        Args:
            schema: The schema.

        Raises:
            DataError: They do not.
        """
        self._has_structs = has_structs(schema)
        schema = flat_schema(schema)
        self._plan = schema, _plan(self.columns, self.labels, schema)

    def __call__(self, records: pa.RecordBatch) -> Batch:
        """The batch of these records."""
        plan = self._plan
        if self._has_structs is None:
            self._has_structs = has_structs(records.schema)
        if self._has_structs:
            records = flat_batch(records)
        if plan is None or not (plan[0] is records.schema or plan[0].equals(records.schema)):
            plan = self._plan = records.schema, _plan(self.columns, self.labels, records.schema)
        entries: dict[str, Entry] = {}
        name = None
        try:
            for name, index, read in plan[1]:
                entries[name] = read(records.column(index))
        except pa.ArrowException as error:
            raise DataError(reason(error), column=name) from error
        except DataError as error:
            if error.column is not None:
                raise
            raise DataError(error.detail, place=error.place, column=name) from error
        return Batch(entries)

    def __repr__(self) -> str:
        return f"Decoder({list(self.columns)})"


def _plan(
    columns: Sequence[Column], labels: Sequence[str], schema: pa.Schema
) -> list[tuple[str, int, _Read]]:
    plan = []
    for column in columns:
        indices = schema.get_all_field_indices(column.name)
        if len(indices) != 1:
            what = "missing" if not indices else f"present {len(indices)} times"
            has = ", ".join(schema.names) or "none"
            raise DataError(f"The column is {what}. The records' columns are: {has}.", column=column.name)
        read = _reader(column, schema.field(indices[0]).type)
        plan.append((column.name, indices[0], _required(column, read) if column.name in labels else read))
    return plan


def _required(column: Column, read: _Read) -> _Read:
    def read_all(array: pa.Array) -> Entry:
        if (row := first_missing(column, array)) is not None:
            raise DataError(missing_value("label"), column=column.name, place=f"row {row} of the records")
        return read(array)

    return read_all


def _reader(column: Column, type_: pa.DataType) -> _Read:
    known_type = _known_type(column, type_)
    if isinstance(column, Fixed):
        read = _fixed(column, known_type)
    elif isinstance(column, Raw):
        read = _raw(column, known_type)
    else:
        read = _varlen(column, known_type)
    return read if known_type == type_ else lambda array: read(array.cast(known_type))


def _known_type(column: Column, type_: pa.DataType) -> pa.DataType:
    """The type, with null, which is no information, replaced by one that fits the declared column."""
    if is_list(type_):
        inner = _known_type(column, type_.value_type)
        return type_ if inner == type_.value_type else pa.list_(inner)
    if not pa.types.is_null(type_):
        return type_
    if isinstance(column, Fixed):
        whole = (
            isinstance(column.default, int) if column.dtype is None else not column.dtype.is_floating_point
        )
        return pa.int64() if whole else pa.float32()
    return pa.string() if isinstance(column, Raw) or column.hash else pa.int64()


def _fixed(column: Fixed, type_: pa.DataType) -> _Read:
    levels, leaf = unnest(type_)
    if not is_number(leaf) or levels > 1 or (levels == 0 and column.length != 1):
        expected = "numbers" if column.length == 1 else f"lists of {column.length} numbers"
        raise _wrong(column, expected, type_, " or declare a Raw, or a Varlen with a hash" * is_text(leaf))
    defaults = column.defaults()
    check_defaults(defaults, arrow_to_torch.plain_type(leaf), column.dtype, column.name)
    if levels == 0 or column.length == 1:
        read = arrow_to_torch.number_reader(leaf, None if defaults is None else defaults[0], column.dtype)
        return (lambda array: read(_single(column, array))) if levels else read
    return _matrix(column, leaf)


def _single(column: Fixed, array: pa.Array) -> pa.Array:
    """The values of lists of one value each, with null for lists that are null or empty."""
    values, present = arrow_to_torch.of_length(array, 1, column.name)
    if bool(present.all()):
        return values
    indices = torch.cumsum(present, 0) - 1
    return values.take(pa.array(indices.numpy(), mask=~present.numpy()))


def _matrix(column: Fixed, leaf: pa.DataType) -> _Read:
    length, defaults = column.length, column.defaults()
    floating = arrow_to_torch.is_floating(leaf) if column.dtype is None else column.dtype.is_floating_point
    whole = not floating and arrow_to_torch.is_floating(leaf)
    convert = arrow_to_torch.number_reader(pa.int64() if whole else leaf, 0, column.dtype)

    def read(array: pa.Array) -> Tensor:
        values, present = arrow_to_torch.of_length(array, length, column.name)
        if whole:
            values = whole_numbers(values)
        matrix = convert(values)
        assert isinstance(matrix, Tensor)
        matrix = matrix.reshape(-1, length)
        complete = bool(present.all())
        if complete and not values.null_count:
            return matrix
        if defaults is None and not floating:
            row = first_missing(column, array)
            raise DataError(missing_in_list(length), column=column.name, place=f"row {row} of the records")
        fill = torch.tensor([math.nan] * length if defaults is None else defaults).to(matrix.dtype)
        if values.null_count:
            matrix = torch.where(arrow_to_torch.is_null(values).reshape(-1, length), fill, matrix)
        if complete:
            return matrix
        out = fill.repeat(len(array), 1)
        out[present] = matrix
        return out

    return read


def _raw(column: Raw, type_: pa.DataType) -> _Read:
    levels, leaf = unnest(type_)
    if not is_text(leaf) or levels > 1:
        raise _wrong(column, "strings or lists of strings", type_)

    def known(array: pa.Array) -> pa.Array:
        array = arrow_to_torch.logical(array)
        if column.default is None or not array.null_count:
            return array
        if pa.types.is_dictionary(array.type):
            array = arrow_to_torch.decoded(array)
        return array.cast(pa.large_binary()).fill_null(column.default.encode())

    def nested(array: pa.Array) -> NestedRagged:
        outer, strings = arrow_to_torch.peel(array)
        outer, strings = arrow_to_torch.drop_null(outer, known(strings))
        rows = arrow_to_torch.texts(strings)
        assert rows.offsets is not None
        return NestedRagged(rows.values, rows.offsets, outer)

    def single(array: pa.Array) -> Entry:
        array = known(array)
        if not array.null_count:
            return arrow_to_torch.texts(array)
        rows = arrow_to_torch.texts(array.drop_null())
        assert rows.offsets is not None
        return OptionalText(rows.values, rows.offsets, arrow_to_torch.valid_offsets(array))

    return nested if levels else single


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
    # In a list of floats, NaN marks a missing value; ids have no such value.
    keeps_null = levels > 0 and is_number(key) and arrow_to_torch.is_floating(key)

    def values(array: pa.Array) -> Tensor:
        if column.hash is None:
            return arrow_to_torch.numbers(array, math.nan if keeps_null else 0)
        return arrow_to_torch.hashed(array, column.hash, column.bucket)

    def read(array: pa.Array) -> Entry:
        bounds: list[Tensor] = []
        for _ in range(levels):
            offsets, array = arrow_to_torch.peel(array)
            bounds.append(offsets)
        if levels == 0:
            bounds.append(torch.arange(len(array) + 1))
        if weighted:
            return read_weighted(array, bounds[0])
        if not keeps_null:
            bounds[-1], array = arrow_to_torch.drop_null(bounds[-1], arrow_to_torch.logical(array))
        if levels == 2:
            return NestedRagged(values(array), bounds[1], bounds[0])
        return Ragged(values(array), bounds[0])

    def read_weighted(array: pa.Array, offsets: Tensor) -> Ragged:
        keys, weights = array.flatten()  # unlike field(), this returns null fields for a null struct
        keys = arrow_to_torch.logical(keys)
        if keys.null_count:
            weights = weights.filter(keys.is_valid())
            offsets, keys = arrow_to_torch.drop_null(offsets, keys)
        if weights.null_count:
            row = arrow_to_torch.row_of(offsets, int(arrow_to_torch.is_null(weights).nonzero()[0, 0]))
            raise DataError(MISSING_WEIGHT, column=column.name, place=f"row {row} of the records")
        return Ragged(values(keys), offsets, arrow_to_torch.numbers(weights).to(torch.float32))

    return read


def _wrong(column: Column, expected: str, type_: pa.DataType, otherwise: str = "") -> DataError:
    kind = type(column).__name__
    hint = f" Change the data{otherwise}." if otherwise else ""
    return DataError(
        f"{kind} expects {expected}, but the column's type is {type_}.{hint}", column=column.name
    )
