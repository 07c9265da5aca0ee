"""Parquet files. Groups are row groups; page checksums are verified where the file has them.

pyarrow decodes a complete row group at a time, its columns on all cores: a loader's readers work in parallel
only at the start of the next file, so most of the time all of them wait for one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import fs, types
from pyarrow import parquet as pq

from karvan.data.errors import located
from karvan.data.formats.base import FileSource, Layout
from karvan.data.formats.decoded_size import check_decoded, most_decoded
from karvan.data.formats.parquet_pages import chunk_bytes, chunk_size
from karvan.threads import map_on_threads

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
        if (found := chunk.statistics) is not None and found.has_null_count and found.null_count
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
            view, at = memoryview(file.read_at(bounds[1] - bounds[0], bounds[0])), bounds[0]
            while view:
                written = os.pwrite(copy.fileno(), view, at)
                view, at = view[written:], at + written

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
