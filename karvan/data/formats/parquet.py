"""Parquet files. Groups are row groups; page checksums are verified where the file has them.

pyarrow decodes a complete row group at a time, its columns on all cores: a loader's readers work in parallel
only at the start of the next file, so most of the time all of them wait for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from karvan.data.formats.base import FileSource, Layout

_DECODED_AT_ONCE = 64 << 20  # row groups up to this size; this is fastest
_VALUES_AT_ONCE = 1 << 25  # a value that is repeated takes no bytes in the file
_ROWS = 131_072  # records at a time of larger ones, which may not fit into memory


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
        with self._open(path) as file:
            parquet = _reader(file, layout, pre_buffer=True)
            for number in range(group, len(layout.starts) - 1):
                pieces: Iterable[pa.RecordBatch]
                row_group = layout.detail.row_group(number)
                values = row_group.num_rows * len(columns)
                if row_group.total_byte_size > _DECODED_AT_ONCE or values > _VALUES_AT_ONCE:
                    pieces = _reader(file, layout, pre_buffer=False).iter_batches(_ROWS, [number], columns)
                else:
                    pieces = parquet.read_row_group(number, columns).to_batches()
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


def _reader(file: pa.NativeFile, layout: Layout, pre_buffer: bool) -> pq.ParquetFile:
    """A reader of an open file; `pre_buffer` fetches all columns of a row group first, in few large reads."""
    return pq.ParquetFile(
        file, metadata=layout.detail, pre_buffer=pre_buffer, page_checksum_verification=True
    )
