"""Structs as columns: the fields of a struct `a` are the columns `a.b` and `a.c`, at any depth.

A pair of an id and its weight stays one column, which `Varlen` reads, and so does a struct with a field whose
name is that of a column. A field of a missing struct is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyarrow import types

from karvan.data.columns.declarations import is_weighted


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
