"""What the heads of Parquet's pages declare: they are read before a page is decompressed.

A column chunk is a sequence of pages, each after a head in Thrift's compact encoding
(https://github.com/apache/parquet-format has its fields). What the footer says about their sizes is not used:
the decoder believes the heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from karvan.data.errors import DataError
from karvan.native import _native

_HEAD, _LONGEST_HEAD, _DICTIONARY_HEAD, _LARGEST_DICTIONARY = 128, 16 << 20, 100, 16 << 20  # bytes
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_PREFIXES = 7  # DELTA_BYTE_ARRAY: strings that repeat the beginning of the last one
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_TEXT = "BYTE_ARRAY"


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """What decoding a column chunk takes, in bytes: its largest pages, and each value at most.

    `entry` is the longest string of its dictionary, as which each value may be decoded.
    """

    pages: int
    values: int
    value: int
    entry: int = 0

    @property
    def most(self) -> int:
        """How many bytes all values have at most."""
        return self.values * max(self.value, self.entry)


def chunk_size(file: pa.NativeFile, chunk: pq.ColumnChunkMetaData, column: pq.ColumnSchema) -> ChunkSize:
    """The size of a column chunk of the open `file`."""
    is_text = chunk.physical_type == _TEXT
    width = 4 if is_text else _WIDTHS.get(chunk.physical_type, column.length)
    if column.max_repetition_level == 0 and not is_text and chunk.compression in ("UNCOMPRESSED", "SNAPPY"):
        return ChunkSize(0, chunk.num_values, width)  # a page is at most 21 times its stored size
    dictionary = page = values = longest = entry = 0
    for at, kind, plain, stored, count, encoding in _pages(file, chunk):
        if kind == _DICTIONARY:
            dictionary = plain
            if is_text:
                entry = width + _longest_entry(file, chunk.compression, at, plain, stored, count)
        else:
            page = max(page, plain)
            values += count
            if is_text:
                longest = max(longest, plain if encoding == _PREFIXES else -(-plain // max(count, 1)))
    return ChunkSize(dictionary + 2 * page, values, width + longest, entry)


def _pages(
    file: pa.NativeFile, chunk: pq.ColumnChunkMetaData
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """The pages: first byte after the head, kind, size once decompressed and as stored, values, encoding."""
    at, end = chunk_bytes(chunk)
    values = 0
    while values < chunk.num_values and at < end:
        fields, at = _head(file, at)
        kind, plain, stored = (fields.get(number, 0) for number in (1, 2, 3))
        head = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}.get(kind, -1), {})
        count, encoding = head.get(1, 0), head.get(4 if kind == _DATA_2 else 2, 0)
        if min(plain, stored, count) < 0:
            raise DataError("The head of a page has a negative size: the file is damaged.")
        if kind in (_DATA, _DATA_2):
            values += count
        if kind in (_DATA, _DATA_2, _DICTIONARY):
            yield at, kind, plain, stored, count, encoding
        at += stored


def chunk_bytes(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Where a column chunk begins and ends; old writers did not count the head of a dictionary."""
    begin: int = chunk.data_page_offset
    if 0 < (chunk.dictionary_page_offset or 0) < begin:
        begin = chunk.dictionary_page_offset
    return begin, begin + chunk.total_compressed_size + _DICTIONARY_HEAD


def _longest_entry(file: pa.NativeFile, codec: str, at: int, plain: int, stored: int, count: int) -> int:
    """How many bytes the longest string of a dictionary has, or a number that is larger."""
    if plain > _LARGEST_DICTIONARY:
        return plain
    try:
        data = file.read_at(stored, at)
        if codec != "UNCOMPRESSED":
            data = pa.Codec("lz4_raw" if codec == "LZ4" else codec.lower()).decompress(data, plain)
        _, lengths, _, _ = _native.find_chunk_records(np.frombuffer(data, np.uint8), count)
    except (OSError, ValueError):
        return plain
    return int(lengths.max(initial=0))


def _head(file: pa.NativeFile, at: int) -> tuple[dict[int, Any], int]:
    """The fields of the head of a page, and where it ends."""
    size = _HEAD
    while True:
        data = bytes(file.read_at(size, at))
        try:
            fields, end = _struct(data, 0, 0)
        except IndexError:
            if len(data) < size or size >= _LONGEST_HEAD:
                raise DataError("The head of a page cannot be read: the file is damaged.") from None
            size *= 8
        else:
            return fields, at + end


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The numbers and structs of a struct, and where it ends; an IndexError if the bytes end before."""
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        delta, kind = data[at] >> 4, data[at] & 15
        at += 1
        if delta:
            number += delta
        else:
            number, at = _varint(data, at)
            number = number >> 1 ^ -(number & 1)
        if kind in (4, 5, 6):
            value, at = _varint(data, at)
            fields[number] = value >> 1 ^ -(value & 1)
        elif kind == 12 and depth < 4:
            fields[number], at = _struct(data, at, depth + 1)
        elif kind == 8:
            size, at = _varint(data, at)
            at += size
        elif kind in (3, 7):
            at += 1 if kind == 3 else 8
        elif kind not in (1, 2):  # true and false
            raise DataError("The head of a page has fields of an unknown kind: the file is damaged.")
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise DataError("The head of a page has a number that is too long: the file is damaged.")
