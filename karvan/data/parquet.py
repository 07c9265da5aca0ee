"""Parquet files. Groups are row groups; page checksums are verified where the file has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from karvan.data.files import FileSource, Layout

_WHOLE = 64 << 20  # row groups up to this size are decoded at once, which is fastest
_ROWS = 131_072  # of larger ones, which may not fit into memory, so many records


class ParquetSource(FileSource):
    """Parquet files; counts come from their footers."""

    group_name = "row group"

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        parquet = pq.ParquetFile(file)
        metadata = parquet.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
            raise ValueError(
                f"The footer promises {metadata.num_rows} records, its row groups {sum(counts)}."
            )
        return Layout(parquet.schema_arrow, np.cumsum([0, *counts], dtype=np.int64), metadata)

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        with self._open(path) as file:
            parquet = pq.ParquetFile(file, metadata=layout.detail, page_checksum_verification=True)
            for number in range(group, len(layout.starts) - 1):
                if layout.detail.row_group(number).total_byte_size <= _WHOLE:
                    pieces = parquet.read_row_group(number, columns).to_batches()
                else:
                    pieces = parquet.iter_batches(_ROWS, [number], columns)
                for batch in pieces:
                    yield number, batch
