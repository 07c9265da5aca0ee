"""`DeviceCapture`: tables of a `CudaStore` as they were at one moment."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from karvan.store.capture import Capture
from karvan.store.cuda.rows import contents
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.rows.tables import DeviceTable
from karvan.store.types import Keys, Rows


class DeviceCapture(Capture):
    """All rows are copied to the host when the capture is made."""

    def __init__(
        self,
        memory: TableMemory,
        tables: Mapping[str, DeviceTable],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None,
    ) -> None:
        self.versions = {name: table.version for name, table in tables.items()}
        self._parts = parts
        self._rows: dict[str, Rows] = {}
        self._erased: dict[str, Keys] = {}
        for name, table in tables.items():
            table.arena.captured_version = table.arena.newest_version
            noted = contents.list_rows(memory, table)
            if since is not None:
                chosen = (noted.changes > since[name]).nonzero()[:, 0]
                noted = type(noted)(*(field[chosen] for field in noted))
                self._erased[name] = contents.erased_keys(table, since[name])
            self._rows[name] = contents.to_host(memory, table, noted)

    def part(self, table: str, part: int) -> Rows:
        """See `Capture.part`."""
        rows = self._rows[table]
        hashes = contents.mix(rows.keys).view(np.uint64)
        parts = self._parts[table]
        first, last = (
            len(hashes)
            if (p << 64) // parts > 2**64 - 1
            else np.searchsorted(hashes, np.uint64((p << 64) // parts))
            for p in (part, part + 1)
        )
        return Rows._make(np.ascontiguousarray(array[first:last]) for array in rows)

    def erased(self, table: str) -> Keys:
        """See `Capture.erased`."""
        return self._erased.get(table, np.zeros(0, np.int64))

    def close(self) -> None:
        """See `Capture.close`."""
        self._rows.clear()
