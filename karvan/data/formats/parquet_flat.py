"""Columns of plain numbers in Parquet files, decoded by the native core.

pyarrow decodes everything, and spends much of its time on what such columns rarely have: nulls. So flat
columns of numbers, Snappy or uncompressed, are decoded by `csrc/parquet/`. Where a column's pages hold
anything unusual, or are damaged, the native decoder makes nothing of them, and pyarrow reads that column:
there is one place that knows all of Parquet, and what is wrong with a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet as pq

from karvan import _native
from karvan.threads import cores

_PHYSICAL = {
    pa.int32(): "INT32",
    pa.uint32(): "INT32",
    pa.int64(): "INT64",
    pa.uint64(): "INT64",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
}
_CODECS = ("SNAPPY", "UNCOMPRESSED")
_GAP = 64 << 10  # bytes that are read for nothing rather than read around
_WORTH_A_THREAD = 1 << 20  # bytes of pages; decoding them takes about a millisecond
_MOST_ROWS = 1 << 24  # no sane row group has more; a damaged footer may promise any number


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that may be decoded here, and its number among the file's leaves."""

    name: str
    leaf: int
    type: pa.DataType
    optional: bool


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where the pages of a column's row group lie in the file."""

    column: _Column
    first: int
    size: int
    snappy: bool


class FlatColumns:
    """Reads those of the named columns that are flat numbers, a row group at a time."""

    def __init__(
        self, file: pa.NativeFile, metadata: pq.FileMetaData, schema: pa.Schema, names: Sequence[str]
    ) -> None:
        self._file = file
        self._size = file.size()
        self._metadata = metadata
        self._columns = list(_flat(metadata.schema, schema, set(names)))

    def read(self, group: int, threads: int | None = None) -> dict[str, pa.Array]:
        """The columns of a row group that could be decoded; the others are for pyarrow.

        By default as many threads as Arrow would use, if there is work for them. A loader's readers work side
        by side only where the next file begins: mostly it is one of them that all wait for.
        """
        metadata = self._metadata.row_group(group)
        rows = metadata.num_rows
        if not 0 < rows <= _MOST_ROWS:
            return {}
        chunks = [chunk for column in self._columns if (chunk := self._chunk(metadata, column, rows))]
        if not chunks:
            return {}
        pages, places = self._pages(chunks)
        values = [pa.allocate_buffer(rows * chunk.column.type.bit_width // 8) for chunk in chunks]
        bits = [pa.allocate_buffer((rows + 7) // 8) if chunk.column.optional else None for chunk in chunks]
        work = [
            _native.ColumnChunk(
                place,
                chunk.size,
                rows,
                chunk.column.type.bit_width // 8,
                chunk.snappy,
                chunk.column.optional,
                value.address,
                0 if bit is None else bit.address,
            )
            for chunk, place, value, bit in zip(chunks, places, values, bits, strict=True)
        ]
        if threads is None:
            threads = min(cores(), 1 + len(pages) // _WORTH_A_THREAD)
        nulls = _native.decode_chunks(pages, work, threads)
        return {
            chunk.column.name: pa.Array.from_buffers(
                chunk.column.type, rows, [bit if missing else None, value], missing
            )
            for chunk, value, bit, missing in zip(chunks, values, bits, nulls, strict=True)
            if missing >= 0
        }

    def _chunk(self, group: pq.RowGroupMetaData, column: _Column, rows: int) -> _Chunk | None:
        chunk = group.column(column.leaf)
        first, size, codec = chunk.data_page_offset, chunk.total_compressed_size, chunk.compression
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < first:
            first = chunk.dictionary_page_offset
        inside = first >= 0 and size > 0 and first + size <= self._size and not chunk.file_path
        if not inside or chunk.num_values != rows or codec not in _CODECS:
            return None
        return _Chunk(column, first, size, codec == "SNAPPY")

    def _pages(self, chunks: list[_Chunk]) -> tuple[NDArray[np.uint8], list[int]]:
        """The pages of all chunks, neighbours read in one go, and where each chunk's are."""
        runs: list[list[int]] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.first):
            if not runs or chunk.first > runs[-1][1] + _GAP:
                runs.append([chunk.first, chunk.first])
            runs[-1][1] = max(runs[-1][1], chunk.first + chunk.size)
        total = sum(end - first for first, end in runs)
        pages = np.frombuffer(
            pa.py_buffer(_native.Buffer(total)), np.uint8, total
        )  # from the pool: no page faults
        places: dict[int, int] = {}
        at = 0
        for first, end in runs:
            self._file.seek(first)
            if self._file.readinto(pages[at : at + end - first]) != end - first:
                raise OSError("The file is shorter than it was when its footer was read.")
            places |= {
                chunk.first: chunk.first - first + at for chunk in chunks if first <= chunk.first < end
            }
            at += end - first
        return pages, [places[chunk.first] for chunk in chunks]


def _flat(leaves: pq.ParquetSchema, schema: pa.Schema, names: set[str]) -> Iterator[_Column]:
    for number in range(len(leaves)):
        leaf = leaves.column(number)
        # A leaf whose path is its name is not inside of another column.
        if leaf.name not in names or leaf.path != leaf.name or leaf.max_repetition_level != 0:
            continue
        type_ = schema.field(leaf.name).type
        if _PHYSICAL.get(type_) == leaf.physical_type and leaf.max_definition_level <= 1:
            yield _Column(leaf.name, number, type_, leaf.max_definition_level == 1)
