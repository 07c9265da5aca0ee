"""`CudaTable`: one table of a `CudaStore`, outside of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from karvan.store.base import LocalTable, clock_arrays, clock_of
from karvan.store.cuda import contents
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.table_memory import DeviceTable, TableMemory, memory_report
from karvan.store.types import Keys, Rows


class CudaTable(LocalTable):
    """A table whose rows are in the memory of a GPU, or partly in host memory."""

    def __init__(self, memory: TableMemory, table: DeviceTable) -> None:
        super().__init__(table.spec.name)
        self._memory = memory
        self._table = table

    @property
    def settled(self) -> DeviceTable:
        """The table on the device, once rows beyond the capacity of its policy have been evicted."""
        with memory_report(self._memory):
            contents.settle(self._memory)
        return self._table

    @override
    def set_state(self, initial: Sequence[float], fresh: bool) -> None:
        memory, table = self._memory, self.settled
        same = len(initial) == table.arena.layout.state
        memory.set_initial_state(table, initial)
        if same and not fresh:
            return
        memory.learn_now()
        rows = self.snapshot() if memory.rows_bound(table) else None
        if rows is not None:
            state = np.tile(np.array(initial, np.float32), (len(rows.keys), 1))
            rows = rows._replace(state=np.ascontiguousarray(state.reshape(len(rows.keys), len(initial))))
            self._empty()
        table.move_to(memory.arena(table.arena.layout._replace(state=len(initial))))
        memory.set_initial_state(table, initial)
        if rows is not None:
            contents.load_rows(memory, table, rows)
            table.erasures.newest = table.version  # rows have other numbers now
            memory.own_counters(table)[fields.INSERTED.value] -= len(rows.keys)
            memory.learn_now()

    def _empty(self) -> None:
        """Release all rows, and the index, without a note of the keys."""
        memory, table = self._memory, self._table
        memory.tier.join()  # it reads the index
        noted = contents.list_rows(memory, table)
        evicted = memory.own_counters(table)[fields.EVICTED.value].clone()
        contents.erase_hashes(memory, table, noted.hashes, log=False)
        counters = memory.own_counters(table)
        counters[fields.EVICTED.value] = evicted
        counters[fields.USED.value].zero_()
        table.index = type(table.index)(memory.device)
        table.used.restart(0, memory.counters.time, memory.counters.time + 1)
        table.room = 0
        memory.learn_now()

    @override
    def skip(self) -> None:
        self.settled.skipped += 1

    @override
    def evict(self, *, step: int, now: float) -> int:
        return contents.evict(self._memory, self.settled, step, now)

    @override
    def _erase(self, keys: Keys) -> int:
        hashes = torch.from_numpy(contents.mix(np.unique(np.asarray(keys, np.int64))))
        return contents.erase_hashes(self._memory, self.settled, hashes.to(self._memory.device))

    @override
    def clear(self) -> None:
        memory, table = self._memory, self.settled
        noted = contents.list_rows(memory, table)
        self._empty()
        table.erasures.add(table.next_version(), noted.hashes, 1 << 62)
        memory.own_counters(table)[fields.EVICTED.value] += noted.rows.numel()
        if table.filter is not None:
            table.filter.zero_()

    @property
    @override
    def version(self) -> int:
        return self.settled.version

    @override
    def evicted_since(self, version: int) -> Keys:
        return contents.erased_keys(self.settled, version)

    @override
    def _snapshot(self, part: int, parts: int) -> Rows:
        memory, table = self._memory, self.settled
        low, high = (-(-(p << 64) // parts) for p in (part, part + 1))
        return contents.to_host(memory, table, contents.list_rows(memory, table, low, high - 1))

    @override
    def _load(self, rows: Rows) -> None:
        table, count = self.settled, len(rows.keys)
        layout = table.arena.layout
        for what, array, floats in (
            ("vectors", rows.vectors, layout.dim),
            ("state", rows.state, layout.state),
        ):
            if array.shape != (count, floats):
                raise ValueError(
                    f"Table '{self.name}': expected {what} of shape ({count}, {floats}), got {array.shape}."
                )
        with memory_report(self._memory):
            contents.load_rows(self._memory, table, rows)

    @override
    def extra(self) -> dict[str, NDArray[Any]]:
        table = self.settled
        arrays: dict[str, NDArray[Any]] = {}
        if table.filter is not None:
            arrays["filter_counts"] = table.filter.clamp(max=255).to(torch.uint8).cpu().numpy()
        return arrays | clock_arrays(table.clock)

    @override
    def load_extra(self, extra: Mapping[str, NDArray[Any]]) -> None:
        table = self.settled
        if "filter_counts" in extra and table.filter is not None:
            counts = torch.from_numpy(np.ascontiguousarray(extra["filter_counts"]))
            if counts.numel() != table.filter.numel():
                raise ValueError(
                    f"Table '{self.name}': expected {table.filter.numel()} counters of its filter, got "
                    f"{counts.numel()}."
                )
            table.filter.copy_(counts)
        table.clock = clock_of(extra)

    @override
    def stats(self) -> dict[str, int]:
        """Waits for the device."""
        memory, table = self._memory, self.settled
        counters = memory.learn_now()[table.number * fields.COUNTERS.value :]
        size, on_host = memory.bytes(table), contents.host_bytes(memory, table)
        return {
            "rows": int(counters[fields.ROWS.value]),
            "bytes": size,
            "inserted": int(counters[fields.INSERTED.value]),
            "evicted": int(counters[fields.EVICTED.value]),
            "rejected": int(counters[fields.REJECTED.value]),
            "dropped_gradients": int(counters[fields.DROPPED.value]),
            "skipped_updates": int(counters[fields.SKIPPED.value]) + table.skipped,
            "moved": table.index.moved_in_all,
            "device_bytes": size - on_host,
            "host_bytes": on_host,
            "tier_hits": int(counters[fields.TIER_HITS.value]),
            "tier_misses": int(counters[fields.TIER_MISSES.value]),
            "tier_exchanges": int(counters[fields.TIER_EXCHANGES.value]),
        }
