"""`DeviceCapture`: tables of a `CudaStore` as they were at one moment, read while training continues."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from karvan.store.capture import Capture
from karvan.store.cuda.captures.pending_rows import PendingRows
from karvan.store.cuda.rows import contents
from karvan.store.cuda.rows.arena import RowArena
from karvan.store.cuda.rows.contents import RowFields
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.rows.tables import DeviceTable
from karvan.store.types import Keys, Rows


class _Listed(NamedTuple):
    """The rows of a table in a capture, in the order of their hashes."""

    hashes: Tensor
    counts: Tensor
    lasts: Tensor
    bounds: list[int]  # of parts
    pending: PendingRows
    first_range: int  # of those of its arena


class DeviceCapture(Capture):
    """Row numbers, uses and steps are noted at once, on the device; vectors and state are copied by part.

    Rows that change before that are saved first (`PendingRows`).
    """

    def __init__(
        self,
        memory: TableMemory,
        tables: Mapping[str, DeviceTable],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None,
    ) -> None:
        self._reading = threading.Lock()
        self._closed = False
        self.versions = {name: table.version for name, table in tables.items()}
        self._tables: dict[str, DeviceTable] = {}
        self._next = dict.fromkeys(tables, 0)
        self._parts = dict(parts)
        self._listed: dict[str, _Listed] = {}
        self._erased: dict[str, Keys] = {}
        self._pending: list[PendingRows] = []
        for name, table in tables.items():
            _check(table, parts[name])
            if since is not None:
                self._erased[name] = contents.erased_keys(table, since[name])
        by_arena: dict[RowArena, dict[str, RowFields]] = {}
        for name, table in tables.items():
            noted = contents.list_rows(memory, table)
            if since is not None:
                chosen = (noted.changes > since[name]).nonzero()[:, 0]
                noted = RowFields(*(field[chosen] for field in noted))
            by_arena.setdefault(table.arena, {})[name] = noted
        try:
            for arena, listed in by_arena.items():
                self._begin(memory, arena, listed)
        except BaseException:
            self.close()
            raise
        for arena in by_arena:
            arena.captured_version = arena.newest_version
        for name, table in tables.items():
            table.captured = True
            self._tables[name] = table

    def _begin(self, memory: TableMemory, arena: RowArena, listed: Mapping[str, RowFields]) -> None:
        bounds = {name: _bounds(noted.hashes, self._parts[name]) for name, noted in listed.items()}
        cuts, firsts, rows = [0], {}, 0
        for name in listed:
            firsts[name] = len(cuts) - 1
            cuts += [rows + bound for bound in bounds[name][1:]]
            rows = cuts[-1]
        numbers = torch.cat([noted.rows for noted in listed.values()])
        pending = PendingRows(memory, arena, numbers, cuts)
        self._pending.append(pending)
        for name, noted in listed.items():
            self._listed[name] = _Listed(
                noted.hashes, noted.counts, noted.lasts, bounds[name], pending, firsts[name]
            )

    @property
    def saved_bytes(self) -> int:
        """Page-locked memory of rows that changed before they were read."""
        return sum(pending.saved_bytes for pending in self._pending)

    @override
    def part(self, table: str, part: int) -> Rows:
        with self._reading:
            if self._closed:
                raise ValueError("The capture has been closed.")
            if part != self._next[table] or part >= self._parts[table]:
                raise ValueError(
                    f"Table '{table}': parts are read in order; expected part {self._next[table]} of "
                    f"{self._parts[table]}, got {part}."
                )
            noted, pending = self._listed[table], self._listed[table].pending
            some = slice(noted.bounds[part], noted.bounds[part + 1])
            layout, count = pending.layout, some.stop - some.start
            vectors = np.empty((count, layout.dim), np.float32)
            state = np.empty((count, layout.state), np.float32)
            pending.read(noted.first_range + part, vectors, state)
            self._next[table] = part + 1
            hashes, counts, lasts = (
                pending.to_host(field[some]).numpy() for field in (noted.hashes, noted.counts, noted.lasts)
            )
            return Rows(contents.unmix(hashes), vectors, state, counts.view(np.uint32), lasts.view(np.uint32))

    @override
    def erased(self, table: str) -> Keys:
        return self._erased.get(table, np.zeros(0, np.int64))

    @override
    def close(self) -> None:
        with self._reading:
            if self._closed:
                return
            self._closed = True
            for pending in self._pending:
                pending.close()
            for table in self._tables.values():
                table.captured = False
            self._pending.clear()
            self._listed.clear()

    def __del__(self) -> None:
        self.close()


def _check(table: DeviceTable, parts: int) -> None:
    if table.captured:
        raise ValueError(
            f"Table '{table.spec.name}' is being captured already; one capture is read at a time."
        )
    if parts < 1 or parts & (parts - 1):
        raise ValueError(f"Table '{table.spec.name}': parts must be a power of two, got {parts}.")


def _bounds(hashes: Tensor, parts: int) -> list[int]:
    """Where parts begin among the hashes, which are in their order as unsigned numbers, and the end."""
    limits = np.array([(part << 64) // parts - (1 << 63) for part in range(parts)], np.int64)
    at = torch.searchsorted(hashes ^ -(1 << 63), torch.from_numpy(limits).to(hashes.device))
    return [*at.tolist(), hashes.numel()]
