"""Arrow IPC files (also called Feather, version 2). Groups are record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from karvan.data.files import FileSource, Layout


class IpcSource(FileSource):
    """Arrow IPC files; counts come from the head of each record batch, whose columns are not read."""

    group_name = "record batch"

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        schema = ipc.open_file(file).schema
        file.seek(0)
        # No column at all would read every column.
        narrow = ipc.IpcReadOptions(included_fields=[_narrowest(schema)] if len(schema) else [])
        opened = ipc.open_file(file, options=narrow)
        counts = [opened.get_batch(batch).num_rows for batch in range(opened.num_record_batches)]
        return Layout(schema, np.cumsum([0, *counts], dtype=np.int64))

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        wanted = [layout.schema.get_field_index(name) for name in columns]
        with self._open(path) as file:
            opened = ipc.open_file(file, options=ipc.IpcReadOptions(included_fields=wanted))
            for number in range(group, len(layout.starts) - 1):
                batch = opened.get_batch(number)
                # Arrow trusts the offsets in a file; followed blindly, damaged ones lead anywhere.
                batch.validate(full=True)
                yield number, batch


def _narrowest(schema: pa.Schema) -> int:
    def width(place: int) -> int:
        try:
            return int(schema.field(place).type.bit_width)
        except ValueError:
            return 1 << 16

    return min(range(len(schema)), key=width)
