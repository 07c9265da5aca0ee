"""Cells of CSV files: lists, and integers that pyarrow would read as floats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from karvan.data.columns.declarations import is_list
from karvan.data.errors import DataError
from karvan.native import _native

# Tables of integers in text, such as Criteo's logs, parsed natively.
#
# The core reads plain cells only and gives up at anything else: a fraction, a blank, a carriage return, a
# line with an extra cell. The caller then parses the same text with pyarrow, which supports all that is
# allowed and reports the rest, so that neither results nor errors depend on which of the two has read a
# file.


_TYPES = (pa.int64(), pa.float32(), pa.float64())
_DELIMITERS = ("\t", ",", ";", "|")


def integer_parser(
    delimiter: str,
    quote: str | None,
    nulls: Sequence[str],
    schema: pa.Schema,
    columns: Sequence[str],
    hexadecimal: Collection[str],
) -> Callable[[bytes, int], pa.RecordBatch | None] | None:
    """A function of the text of a file with this schema; None if it may hold what the core does not read.

    It gives the records of the text, or None if that is not exactly so many lines of integers.
    """
    requested = pa.schema([field for field in schema if field.name in columns])
    plain = len(schema) > 1 and delimiter in _DELIMITERS and list(nulls) == [""]
    if not plain or not len(requested) or any(field.type not in _TYPES for field in requested):
        return None
    bases = [  # 0 for columns that are not requested
        0 if field.name not in columns else 16 if field.name in hexadecimal else 10 for field in schema
    ]
    quote_bytes = (quote or "").encode()

    def parse(text: bytes, rows: int) -> pa.RecordBatch | None:
        if b"\r" in text or (quote_bytes and quote_bytes in text):
            return None
        values = np.empty((len(requested), rows), np.int64)
        present = np.full((len(requested), (rows + 7) // 8), 255, np.uint8)
        missing = _native.parse_lines(np.frombuffer(text, np.uint8), delimiter, bases, values, present)
        if missing is None:
            return None
        arrays = {}
        for index, field in enumerate(requested):
            bits = pa.py_buffer(present[index]) if missing[index] else None
            buffers = [bits, pa.py_buffer(values[index])]
            cells = pa.Array.from_buffers(pa.int64(), rows, buffers, missing[index])
            arrays[field.name] = cells if field.type == pa.int64() else cells.cast(field.type, safe=False)
        return pa.RecordBatch.from_pydict({name: arrays[name] for name in columns})

    return parse


# Lists, ids with weights and hexadecimal ids in text cells.


def from_text(array: pa.Array, type_: pa.DataType, separators: tuple[str, str, str], column: str) -> pa.Array:
    """Cells as lists, lists of lists, or maps; `separators`: of the outer list, the inner list, a pair."""
    outer, inner, pair = separators
    if types.is_map(type_):
        entries = _split(array, outer)
        keys, weights = _pairs(entries.values, pair, column)
        maps = pa.MapArray.from_arrays(
            entries.offsets, keys.cast(type_.key_type), weights.cast(type_.item_type), mask=_null_mask(array)
        )
        return maps.cast(type_)
    if not is_list(type_):
        raise DataError(f"A cell of text cannot hold the type {type_}.", column=column)
    parts = _split(array, outer)
    leaf = type_.value_type
    if is_list(leaf):
        values = from_text(parts.values, leaf, (inner, outer, pair), column)
    elif types.is_struct(leaf) and leaf.num_fields == 2:
        keys, weights = _pairs(parts.values, pair, column)
        fields = [leaf.field(0), leaf.field(1)]
        values = pa.StructArray.from_arrays(
            [keys.cast(fields[0].type), weights.cast(fields[1].type)], fields=fields
        )
    else:
        values = _parsed(parts.values, leaf)
    return pa.ListArray.from_arrays(parts.offsets, values, mask=_null_mask(array)).cast(type_)


def _parsed(texts: pa.Array, type_: pa.DataType) -> pa.Array:
    try:
        return texts.cast(type_)
    except pa.ArrowInvalid:
        if not pc.any(pc.equal(texts, "")).as_py():
            raise
    # An empty item in a list of numbers is a missing number.
    return pc.if_else(pc.equal(texts, ""), None, texts).cast(type_)


def from_digits(array: pa.Array, column: str) -> pa.Array:
    """Integers as int64; if they do not fit, as the bits of unsigned 64-bit ids."""
    array = pc.utf8_trim_whitespace(array)
    try:
        return array.cast(pa.int64())
    except pa.ArrowInvalid:
        pass
    try:
        return array.cast(pa.uint64()).view(pa.int64())
    except pa.ArrowInvalid as error:
        raise DataError(
            f"Expected 64-bit integers, as in the first lines: {error}. They may be from -2^63 to 2^63 - 1, "
            'or from 0 to 2^64 - 1. Declare the column\'s type: schema={…: "float64"} or "string".',
            column=column,
        ) from error


def are_digits(array: pa.Array) -> bool:
    """Whether all cells that are not null are integers, of any size."""
    return bool(pc.all(digits_only(array)).as_py())


def digits_only(array: pa.Array) -> pa.Array:
    """Which cells are integers, of any size; null for null."""
    return pc.match_substring_regex(pc.utf8_trim_whitespace(array), r"^[+-]?([0-9]+|0[xX][0-9a-fA-F]+)$")


def differ_only_in_zeros(array: pa.Array, column: str) -> bool:
    """Whether several cells of integers, such as `007` and `7`, are one number."""
    cells = pc.utf8_trim_whitespace(array)
    return bool(pc.count_distinct(cells).as_py() > pc.count_distinct(from_digits(cells, column)).as_py())


def ambiguous_cell(array: pa.Array) -> str | None:
    """A cell such as `12e7` in a column whose other cells are digits, as programs write ids in base 16.

    A program that writes floats has a point or a sign in some of them: `1.0`, `1e+20`.
    """
    digits = pc.match_substring_regex(array, r"^([0-9]+([eE][0-9]+)?|[nN][aA][nN]|[iI][nN][fF])$")
    exponents = array.filter(pc.match_substring_regex(array, r"^[0-9]+[eE][0-9]+$"))
    cell = exponents.drop_null()[0].as_py() if len(exponents.drop_null()) else None
    return str(cell) if cell is not None and bool(pc.all(digits).as_py()) else None


def from_hex(array: pa.Array, column: str) -> pa.Array:
    """Ids written in base 16, as int64; nulls stay."""
    if array.null_count == len(array):
        return pa.nulls(len(array), pa.int64())
    if pc.any(pc.starts_with(array, "0x", ignore_case=True)).as_py():
        array = pc.replace_substring_regex(array, "^0[xX]", "")
    _, bounds, data = array.buffers()
    offsets = np.frombuffer(bounds, np.int32, len(array) + 1, 4 * array.offset)
    full = np.diff(offsets) == 8
    count = np.count_nonzero(full)
    if count + array.null_count == len(array) and offsets[-1] - offsets[0] == 8 * count:
        ids = np.zeros(len(array), np.int64)
        ids[full] = _eight_digits(data, int(offsets[0]), int(count), column)
        return pa.array(ids, mask=None if count == len(array) else ~full)
    try:
        # Null cells remain null in both steps.
        unsigned = pc.binary_join_element_wise("0x", array, "").cast(pa.uint64())
    except pa.ArrowInvalid as error:
        raise DataError(f"Expected ids in base 16: {error}", column=column) from error
    return unsigned.view(pa.int64())


def _eight_digits(data: pa.Buffer, begin: int, count: int, column: str) -> NDArray[np.int64]:
    """Two digits at a time by a table: ten times as fast as parsing, for the form that Criteo's logs have."""
    digits = np.frombuffer(data, np.dtype("<u2"), 4 * count, begin)
    pairs = _digit_pairs()[digits]
    if pairs.max() > 255:
        bad = int((pairs > 255).nonzero()[0][0]) // 4
        text = digits[4 * bad : 4 * bad + 4].tobytes()
        raise DataError(f"Expected ids in base 16, but one is {text!r}.", column=column)
    return pairs.astype(np.uint8).view(">u4").astype(np.int64)


@cache
def _digit_pairs() -> NDArray[np.uint16]:
    table = np.full(1 << 16, 256, np.uint16)
    values = {ord(digit): int(digit, 16) for digit in "0123456789abcdefABCDEF"}
    for high, a in values.items():
        for low, b in values.items():
            table[high | low << 8] = a * 16 + b
    return table


def _split(array: pa.Array, separator: str) -> pa.ListArray:
    """Text cut at a separator; the empty text, and null, have no parts."""
    empty = pc.equal(array, "").fill_null(True)
    parts = pc.split_pattern(array, separator)
    lengths = pc.if_else(empty, 0, pc.list_value_length(parts)).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    filled = parts.filter(pc.invert(empty)).flatten()
    return pa.ListArray.from_arrays(pa.array(offsets), filled)


def _pairs(entries: pa.Array, separator: str, column: str) -> tuple[pa.Array, pa.Array]:
    cut = pc.split_pattern(entries, separator, max_splits=1)
    if len(entries) and pc.min_max(pc.list_value_length(cut)).as_py() != {"min": 2, "max": 2}:
        raise DataError(f"Expected an id, '{separator}' and a weight in each entry.", column=column)
    both = cut.flatten()
    indices = pa.array(np.arange(0, len(both), 2))
    return both.take(indices), both.take(pc.add(indices, 1))


def _null_mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None
