"""Parquet files. Groups are row groups; page checksums are verified where the file has them.

pyarrow decodes a complete row group at a time, its columns on all cores: a loader's readers work in parallel
only at the start of the next file, so most of the time all of them wait for one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import fs, types
from pyarrow import parquet as pq

from karvan.data.errors import DataError, located
from karvan.data.formats.base import FileSource, Layout, check_decoded, most_decoded, varint, write_at
from karvan.native import _native
from karvan.threads import map_on_threads

# What the heads of Parquet's pages declare: they are read before a page is decompressed.
#
# A column chunk is a sequence of pages, each after a head in Thrift's compact encoding
# (https://github.com/apache/parquet-format has its fields). What the footer says about their sizes is not
# used: the decoder believes the heads.


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
        except OverflowError:
            raise DataError(
                "The head of a page has a number that is too long: the file is damaged."
            ) from None
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
            number, at = varint(data, at)
            number = number >> 1 ^ -(number & 1)
        if kind in (4, 5, 6):
            value, at = varint(data, at)
            fields[number] = value >> 1 ^ -(value & 1)
        elif kind == 12 and depth < 4:
            fields[number], at = _struct(data, at, depth + 1)
        elif kind == 8:
            size, at = varint(data, at)
            at += size
        elif kind in (3, 7):
            at += 1 if kind == 3 else 8
        elif kind not in (1, 2):  # true and false
            raise DataError("The head of a page has fields of an unknown kind: the file is damaged.")
    return fields, at + 1


_DECODED_AT_ONCE = 64 << 20  # row groups up to this size; this is fastest
_VALUES_AT_ONCE = 1 << 25  # a value that is repeated takes no bytes in the file
_ESTIMATED_AT_ONCE = 128 << 20  # if each of its strings were as long as the longest
_FETCH = 8 << 20  # bytes of a read from another file system than a local one
_ROWS, _PIECE = 131_072, 32 << 20  # records and bytes at a time of larger ones, which may not fit into memory


class ParquetSource(FileSource):
    """Parquet files; counts come from their footers."""

    group_name = "row group"
    quick_inspection = True

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        parquet = pq.ParquetFile(file)
        metadata = parquet.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
            raise ValueError(
                f"The footer counts {metadata.num_rows} records, but its row groups have {sum(counts)}."
            )
        nulls = _nulls_of(metadata) if path == self._files.paths[0] else frozenset()
        return Layout(parquet.schema_arrow, np.cumsum([0, *counts], dtype=np.int64), metadata, nulls)

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        is_local = isinstance(self._files.filesystem, fs.LocalFileSystem)
        with self._open(path) as file:
            parquet = _reader(file, layout, pre_buffer=True)
            for number in range(group, len(layout.starts) - 1):
                chunks = _chunks(layout.detail, number, columns)
                # Elsewhere each read takes long, so the heads of pages are read from what is decoded, too.
                stored = file if is_local else _fetched(file, chunks)
                rows = _rows_at_once(stored, layout.detail, number, chunks)
                pieces: Iterable[pa.RecordBatch]
                if rows is not None:
                    pieces = _reader(stored, layout, pre_buffer=False).iter_batches(rows, [number], columns)
                else:
                    opened = parquet if is_local else _reader(stored, layout, pre_buffer=False)
                    pieces = opened.read_row_group(number, columns).to_batches()
                for batch in pieces:
                    yield number, batch


def _nulls_of(metadata: pq.FileMetaData) -> frozenset[str]:
    """The columns that lack values, by the statistics in the footer, if it has any."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    return frozenset(
        chunk.path_in_schema
        for chunk in chunks
        if (statistics := chunk.statistics) is not None
        and statistics.has_null_count
        and statistics.null_count
    )


def _chunks(
    metadata: pq.FileMetaData, number: int, columns: Sequence[str]
) -> dict[int, pq.ColumnChunkMetaData]:
    """The chunks of columns in a row group, by the numbers of their leaves."""
    group = metadata.row_group(number)
    chosen = set(columns)

    def is_chosen(leaf: str) -> bool:
        parts = leaf.split(".")  # names may have dots, too
        return any(".".join(parts[:count]) in chosen for count in range(1, len(parts) + 1))

    chunks = ((at, group.column(at)) for at in range(group.num_columns))
    return {at: chunk for at, chunk in chunks if is_chosen(chunk.path_in_schema)}


def _fetched(file: pa.NativeFile, chunks: Mapping[int, pq.ColumnChunkMetaData]) -> pa.NativeFile:
    """A file in memory that has column chunks of another file at the same places, and nothing else."""
    size = file.size()
    with FileIO(os.memfd_create("row-group"), "r+") as copy:
        copy.truncate(size)

        def fetch(bounds: tuple[int, int]) -> None:
            write_at(copy, file.read_at(bounds[1] - bounds[0], bounds[0]), bounds[0])

        ends = [(begin, min(end, size)) for begin, end in map(chunk_bytes, chunks.values())]
        parts = [(at, min(at + _FETCH, end)) for begin, end in ends for at in range(begin, end, _FETCH)]
        map_on_threads(fetch, parts, 8)
        return pa.memory_map(f"/proc/self/fd/{copy.fileno()}")


def _rows_at_once(
    file: pa.NativeFile, metadata: pq.FileMetaData, number: int, chunks: Mapping[int, pq.ColumnChunkMetaData]
) -> int | None:
    """How many records of a row group to decode at a time, None for all; a DataError if it is too large."""
    group = metadata.row_group(number)
    stored = min(sum(group.column(at).total_compressed_size for at in range(group.num_columns)), file.size())
    pages = lists = row = 0
    for at, chunk in chunks.items():
        column, path = metadata.schema.column(at), chunk.path_in_schema
        size = chunk_size(file, chunk, column)
        pages += size.pages
        if column.max_repetition_level:  # a single record may have all values
            values = size.most
            if values > most_decoded(stored) >= size.values * size.value:
                values = _bytes_of_words(file, metadata, number, path) + size.values * size.value
            lists += values
            row += values // max(group.num_rows, 1)
        else:
            row += max(size.value, size.entry)
        with located(column=path.split(".")[0]):
            check_decoded(pages + lists, stored)
    if (
        group.total_byte_size <= _DECODED_AT_ONCE
        and group.num_rows * len(chunks) <= _VALUES_AT_ONCE
        and group.num_rows * row <= _ESTIMATED_AT_ONCE
    ):
        return None
    return max(min(_ROWS, _PIECE // max(row, 1)), 1)


def _bytes_of_words(file: pa.NativeFile, metadata: pq.FileMetaData, number: int, path: str) -> int:
    """How many bytes the strings of a column of lists have together, of which only numbers are decoded."""
    opened = pq.ParquetFile(file, metadata=metadata, read_dictionary=[path], pre_buffer=False)
    total = 0
    for batch in opened.iter_batches(_ROWS, [number], [path]):
        words = batch.column(0)
        while not types.is_dictionary(words.type):
            words = words.flatten()
        lengths = pc.binary_length(words.dictionary).cast(pa.int64()).take(words.indices)
        total += pc.sum(lengths).as_py() or 0
    return total


def _reader(file: pa.NativeFile, layout: Layout, pre_buffer: bool) -> pq.ParquetFile:
    """A reader of an open file; `pre_buffer` fetches all columns of a row group first, in few large reads."""
    return pq.ParquetFile(
        file, metadata=layout.detail, pre_buffer=pre_buffer, page_checksum_verification=True
    )
