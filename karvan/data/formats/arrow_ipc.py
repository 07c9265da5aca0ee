"""Arrow IPC: files (also called Feather, version 2) and streams. Groups are record batches.

A stream has no index: it is read through once to count, and always from its beginning, so small splits of it
are best read in order. It must end with its end mark, since without it a truncated stream would look
complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from karvan.data.formats.base import FileSource, Layout

_FILE = b"ARROW1"
_END = b"\xff\xff\xff\xff\0\0\0\0"


class IpcSource(FileSource):
    """Arrow IPC files; counts come from the head of each record batch, whose columns are not read."""

    group_name = "record batch"

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        is_file = file.read(len(_FILE)) == _FILE
        file.seek(0)
        schema = (ipc.open_file(file) if is_file else ipc.open_stream(file)).schema
        file.seek(0)
        # An empty list would read every column.
        narrow = ipc.IpcReadOptions(included_fields=[_narrowest(schema)] if len(schema) else [])
        if is_file:
            opened = ipc.open_file(file, options=narrow)
            counts = [opened.get_batch(batch).num_rows for batch in range(opened.num_record_batches)]
        else:
            counts = [batch.num_rows for batch in ipc.open_stream(file, options=narrow)]
            end = file.tell()
            file.seek(max(end - len(_END), 0))
            if end != file.size() or file.read() != _END:
                raise ValueError("The stream does not end with its end mark: it is cut off or damaged.")
        return Layout(schema, np.cumsum([0, *counts], dtype=np.int64), is_file)

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        options = ipc.IpcReadOptions(
            included_fields=[layout.schema.get_field_index(name) for name in columns]
        )
        with self._open(path) as file:
            batches: Iterator[pa.RecordBatch]
            if layout.detail:
                opened = ipc.open_file(file, options=options)
                batches = map(opened.get_batch, range(group, len(layout.starts) - 1))
            else:
                batches = islice(ipc.open_stream(file, options=options), group, None)
            for number, batch in enumerate(batches, group):
                # Arrow trusts the offsets in a file; damaged ones would point outside of the buffers.
                batch.validate(full=True)
                yield number, batch


def _narrowest(schema: pa.Schema) -> int:
    def width(index: int) -> int:
        try:
            return int(schema.field(index).type.bit_width)
        except ValueError:
            return 1 << 16

    return min(range(len(schema)), key=width)
