"""Parquet files. Groups are row groups; page checksums are verified where the file has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from karvan.data.formats.base import FileSource, Layout
from karvan.data.formats.parquet_flat import FlatColumns

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
            flat = FlatColumns(file, layout.detail, layout.schema, columns)

            @cache  # mostly it is not needed, and it is not cheap
            def parquet() -> pq.ParquetFile:
                return pq.ParquetFile(file, metadata=layout.detail, page_checksum_verification=True)

            for number in range(group, len(layout.starts) - 1):
                pieces: Iterable[pa.RecordBatch]
                if layout.detail.row_group(number).total_byte_size > _WHOLE:
                    pieces = parquet().iter_batches(_ROWS, [number], columns)
                else:
                    arrays = flat.read(number)
                    others = [name for name in columns if name not in arrays]
                    rest = parquet().read_row_group(number, others) if others else None
                    pieces = _joined(columns, arrays, rest)
                for batch in pieces:
                    yield number, batch


def _joined(
    names: Sequence[str], arrays: dict[str, pa.Array], rest: pa.Table | None
) -> Sequence[pa.RecordBatch]:
    if rest is None:
        return [pa.RecordBatch.from_arrays([arrays[name] for name in names], names)]
    columns = [arrays[name] if name in arrays else rest.column(name) for name in names]
    batches: list[pa.RecordBatch] = pa.Table.from_arrays(columns, names).to_batches()
    return batches
