"""Rows that come in any order, divided into parts of key hashes by files: memory holds one part at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from typing_extensions import override

from karvan.checkpoint.errors import DamagedCheckpointError
from karvan.checkpoint.foreign.contents import ForeignTable
from karvan.checkpoint.format.manifest import row_bytes
from karvan.store import Rows
from karvan.store.capture import Capture
from karvan.store.exchange.key_sharding import hashes_of
from karvan.store.types import Keys


class HashSpill(Capture):
    """`add` appends rows to the files of their parts; `part` reads one back, in the order of hashes.

    folder: exists, and is empty. source: the checkpoint that the rows come from, for errors.
    """

    def __init__(
        self, folder: Path, source: Path, tables: Mapping[str, ForeignTable], part_bytes: int
    ) -> None:
        self.versions = {}
        self._folder = folder
        self._source = source
        self._tables = dict(tables)
        self._numbers = {name: number for number, name in enumerate(tables)}
        self.parts = {name: _parts(table, part_bytes) for name, table in tables.items()}

    def add(self, name: str, rows: Rows) -> None:
        """Append rows of a table."""
        table, parts = self._tables[name], self.parts[name]
        records = np.empty(len(rows.keys), _record(table))
        records["key"], records["last_step"] = rows.keys, rows.last_steps
        records["vector"], records["state"] = rows.vectors, rows.state
        shift = np.uint64(64 - (parts.bit_length() - 1))
        part_of = hashes_of(rows.keys) >> shift if parts > 1 else np.zeros(len(rows.keys), np.uint64)
        order = np.argsort(part_of, kind="stable")
        present, begins = np.unique(part_of[order], return_index=True)
        ends = [*begins[1:], len(order)]
        for part, begin, end in zip(present.tolist(), begins.tolist(), ends, strict=True):
            with self._path(name, part).open("ab") as file:
                file.write(records[order[begin:end]].tobytes())

    @override
    def part(self, table: str, part: int) -> Rows:
        """An error if a key occurs twice."""
        path = self._path(table, part)
        layout = _record(self._tables[table])
        found = np.fromfile(path, layout) if path.exists() else np.empty(0, layout)
        path.unlink(missing_ok=True)
        found = found[np.argsort(hashes_of(np.ascontiguousarray(found["key"])))]
        keys = np.ascontiguousarray(found["key"])
        if (again := keys[1:] == keys[:-1]).any():
            raise DamagedCheckpointError.mismatch(
                self._source, f"each id of table '{table}' once", f"the id {keys[1:][again][0]} twice"
            )
        return Rows(
            keys,
            np.ascontiguousarray(found["vector"]),
            np.ascontiguousarray(found["state"]),
            np.ones(len(keys), np.uint32),
            np.ascontiguousarray(found["last_step"]),
        )

    def erased(self, table: str) -> Keys:
        """None: a full checkpoint."""
        return np.empty(0, np.int64)

    def close(self) -> None:
        """Nothing to release: the folder is removed by its owner."""

    def _path(self, table: str, part: int) -> Path:
        return self._folder / f"{self._numbers[table]}-{part}"


def _parts(table: ForeignTable, part_bytes: int) -> int:
    """How many equal parts, a power of two, so that none is much above `part_bytes`."""
    total = table.rows * row_bytes(table.dim, table.dtype, table.state)
    return 1 << max(0, -(-total // part_bytes) - 1).bit_length()


def _record(table: ForeignTable) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("key", "<i8"),
            ("last_step", "<u4"),
            ("vector", "<f4", (table.dim,)),
            ("state", "<f4", (table.state,)),
        ]
    )
