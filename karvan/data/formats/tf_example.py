"""tf.Example and Arrow: records of named features as columns, and rows as records.

A feature is a list of bytes, of float32 or of int64. The type of a column says which of them it is, and
whether it is a list or one value: `int64`, `list<float32>`, `string`. A feature that a record does not have
is null; one that is present and empty is an empty list, or null in a column of single values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from karvan.data.columns.declarations import is_list, is_text
from karvan.data.errors import DataError, located
from karvan.native import _native

_LISTS = {"bytes": "bytes_list", "floats": "float_list", "integers": "int64_list"}
_FAULTS = {
    "malformed": (
        "The record is not a tf.Example. For other records, pass options={'content': 'bytes'} to get "
        "their bytes, or decode=, a function that turns them into rows."
    ),
    "size": "The values of one run of records are larger than 2 GiB.",
    "unknown": (
        "The first records do not have this feature. Name it and its type with schema=, or name the "
        "columns to read."
    ),
}
_LEAVES = {"bytes": pa.binary(), "floats": pa.float32(), "integers": pa.int64()}
Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Payloads:
    """Records: where each begins in some bytes, and how long it is. `first` is the number of the first."""

    data: Bytes
    starts: Places
    lengths: Places
    first: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def head(self, count: int) -> Payloads:
        """The first records."""
        return Payloads(self.data, self.starts[:count], self.lengths[:count], self.first)

    def pieces(self, count: int) -> Iterator[Payloads]:
        """All records, up to `count` at a time."""
        for begin in range(0, len(self), count):
            chosen = slice(begin, begin + count)
            yield Payloads(self.data, self.starts[chosen], self.lengths[chosen], self.first + begin)

    def to_list(self) -> list[bytes]:
        """The records as separate bytes."""
        view = self.data.data
        ends = self.starts + self.lengths
        return [bytes(view[a:b]) for a, b in zip(self.starts.tolist(), ends.tolist(), strict=True)]


def check_type(name: str, type_: pa.DataType) -> None:
    """Raise unless a feature can become a column of this type."""
    leaf = type_.value_type if types.is_list(type_) else type_
    if _kind(leaf) is None:
        raise ValueError(
            f"Column '{name}' of tf.Example records can be integers, bools, floats, strings, bytes, or lists "
            f"of one of these, but its type is {type_}."
        )


def summarise(records: Payloads) -> dict[str, pa.DataType]:
    """The features of records and their types: single values, unless a record has several."""
    summaries, fault = _native.summarise_examples(records.data, records.starts, records.lengths)
    if fault is not None:
        raise _error(fault, records)
    column_types = {}
    for name, kind, single in summaries:
        leaf = _LEAVES.get(kind, pa.null())
        column_types[_text(name)] = leaf if single or kind == "none" else pa.list_(leaf)
    return column_types


def decode(records: Payloads, columns: Mapping[str, pa.DataType], all_named: bool) -> pa.RecordBatch:
    """Columns of records. With `all_named`, a feature without a column is an error."""
    kinds = {name: _kind(_leaf(type_)) or "bytes" for name, type_ in columns.items()}
    decoded, fault = _native.decode_examples(
        records.data, records.starts, records.lengths, list(kinds), list(kinds.values()), all_named
    )
    if fault is not None:
        raise _error(fault, records, columns)
    arrays = []
    for (name, type_), (present, offsets, values, byte_offsets) in zip(columns.items(), decoded, strict=True):
        with located(column=name):
            arrays.append(
                _array(type_, present, offsets, _values(type_, values, byte_offsets), records.first)
            )
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(columns.items())))


def encode(rows: pa.RecordBatch) -> tuple[Bytes, Places]:
    """A record for each row, one after the other, and their bounds; nulls are omitted."""
    features = []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        with located(column=field.name):
            bounds, flat = _flatten(column)
            kind = _kind(flat.type)
            if kind is None:
                raise DataError(
                    "A feature of tf.Example can be integers, bools, floats, strings, bytes, or lists of one "
                    f"of these, but the column's type is {field.type}."
                )
            values, byte_offsets = _stored(flat, kind)
        present = column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
        features.append((field.name, kind, present, bounds, values, byte_offsets))
    columns = [list(column) for column in zip(*features, strict=True)] or [[]] * 6
    records: tuple[Bytes, Places] = _native.encode_examples(rows.num_rows, *columns)
    return records


def _kind(leaf: pa.DataType) -> str | None:
    if types.is_integer(leaf) or types.is_boolean(leaf):
        return "integers"
    if types.is_floating(leaf):
        return "floats"
    plain = is_text(leaf) and not types.is_dictionary(leaf) and not types.is_fixed_size_binary(leaf)
    return "bytes" if plain or types.is_null(leaf) else None


def _leaf(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if types.is_list(type_) else type_


def _values(type_: pa.DataType, values: NDArray[np.generic], byte_offsets: NDArray[np.int32]) -> pa.Array:
    leaf = _leaf(type_)
    if _kind(leaf) == "bytes":
        buffers = [None, pa.py_buffer(byte_offsets), pa.py_buffer(values)]
        array = pa.Array.from_buffers(pa.binary(), len(byte_offsets) - 1, buffers)
        return array if types.is_null(leaf) else array.cast(leaf)
    array = pa.array(values)
    if types.is_uint64(leaf):
        return array.view(leaf)  # ids keep their bits
    return array if array.type == leaf else array.cast(leaf)


def _array(
    type_: pa.DataType, present: Bytes, offsets: NDArray[np.int32], values: pa.Array, first: int
) -> pa.Array:
    if types.is_list(type_):
        missing = None if present.all() else pa.array(present == 0)
        return pa.ListArray.from_arrays(pa.array(offsets), values, mask=missing).cast(type_)
    counts = np.diff(offsets)
    if (counts > 1).any():
        at = int((counts > 1).argmax())
        raise DataError(
            f"Expected one value, but there are {counts[at]}. Declare that the column has lists: "
            f"schema={{…: 'list<{type_}>'}}.",
            place=f"record {first + at}",
        )
    if types.is_null(type_):
        if counts.any():
            at = int(counts.argmax())
            raise DataError(
                "The first records have no value of the feature, so its type is unknown: "
                "declare it with schema=.",
                place=f"record {first + at}",
            )
        return pa.nulls(len(counts))
    return values if counts.all() else values.take(pa.array(offsets[:-1], mask=counts == 0))


def _flatten(column: pa.Array) -> tuple[NDArray[np.int32], pa.Array]:
    """The offsets of each row's values, and the values; rows that are null have none."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_list(column.type):
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        flat = column.flatten()
        if types.is_dictionary(flat.type):
            flat = flat.dictionary_decode()
        if flat.null_count:
            raise DataError(
                "A list of tf.Example cannot hold null. Remove such values, or write a value for them."
            )
    else:
        lengths = column.is_valid().to_numpy(zero_copy_only=False)
        flat = column.drop_null()
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), flat


def _stored(flat: pa.Array, kind: str) -> tuple[Bytes, NDArray[np.int32]]:
    none = np.zeros(0, np.int32)
    if kind == "bytes":
        strings = flat.cast(pa.binary())
        if strings.offset:
            strings = pa.concat_arrays([strings, pa.array([], pa.binary())])
        _, inner, data = strings.buffers()
        offsets = np.frombuffer(inner, np.int32)[: len(strings) + 1] if inner and len(strings) else none
        content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
        return content, offsets if len(offsets) else np.zeros(1, np.int32)
    if kind == "integers":
        unsigned = types.is_uint64(flat.type)
        signed = flat.view(pa.int64()) if unsigned else flat.cast(pa.int64())
        return np.ascontiguousarray(signed.to_numpy(zero_copy_only=False)).view(np.uint8), none
    wide = flat.to_numpy(zero_copy_only=False)
    narrow = wide.astype(np.float32)
    if not np.array_equal(narrow.astype(wide.dtype), wide, equal_nan=True):
        raise DataError(
            "tf.Example stores 32-bit floats and would round these values. Cast them to float32 first."
        )
    return np.ascontiguousarray(narrow).view(np.uint8), none


def _error(
    fault: tuple[str, int, bytes, str], records: Payloads, columns: Mapping[str, pa.DataType] | None = None
) -> DataError:
    what, record, feature, kind = fault
    place = f"record {records.first + record}"
    name = _text(feature) if feature else None
    if what in _FAULTS:
        return DataError(_FAULTS[what], place=place, column=None if what == "malformed" else name)
    if columns is None or name is None:
        detail = f"Other records have another kind of list than {_LISTS[kind]}."
    else:
        expected = _LISTS[_kind(_leaf(columns[name])) or "bytes"]
        detail = (
            f"Expected the list {expected}, since the column's type is {columns[name]}, but it is "
            f"{_LISTS[kind]}."
        )
    return DataError(detail, place=place, column=name)


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
