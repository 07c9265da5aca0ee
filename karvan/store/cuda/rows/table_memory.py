"""`TableMemory`: the tables of a store on a device, and the memory of their rows and indexes.

Kernels find everything by addresses and numbers that lie in device memory themselves (`kernels/fields.py`),
so the same launches, or a graph of them, serve every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.find import SPARE_LANES
from karvan.store.cuda.kernels.growth import move_slots
from karvan.store.cuda.rows.admission_filter import new_filter
from karvan.store.cuda.rows.arena import TYPES, RowArena, RowLayout
from karvan.store.cuda.rows.index import WIDTH
from karvan.store.cuda.rows.initial_values import initial_numbers
from karvan.store.cuda.rows.tables import Bound, DeviceTable
from karvan.store.cuda.transfers import Counters, Uploads
from karvan.store.types import TableSpec

_TABLE = fields.TABLE_FIELDS.value
_COUNTERS = fields.COUNTERS.value
_ARENA_COUNTERS = fields.ARENA_COUNTERS.value
_ARENAS = 64  # row layouts that a store may have
_MOST_COLUMNS = 4096
_PROGRAMS = 16  # of a kernel that divides work of unknown size, for each multiprocessor


class TableMemory:
    """Tables by name, arenas by row layout, and what the host knows of both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.uploads = Uploads(device)
        self.counters = Counters(device, _ARENAS * _ARENA_COUNTERS)
        self.spare = torch.zeros(2 * SPARE_LANES.value, dtype=torch.int64, device=device)
        self.empty = torch.zeros(1, dtype=torch.int32, device=device)
        self.inits = torch.zeros(0, dtype=torch.float64, device=device)
        self.side: torch.cuda.Stream | None = None
        self.processors = 0
        self.programs = 2
        if device.type == "cuda":
            self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.programs = _PROGRAMS * self.processors
        self.tables: dict[str, DeviceTable] = {}
        self.epoch = 0  # grows when memory that graphs point to has been replaced
        self._arenas: dict[RowLayout, RowArena] = {}
        self._arena_bounds: dict[RowArena, Bound] = {}
        self._states: dict[RowArena, Tensor] = {}
        self._descriptors = np.zeros((0, _TABLE), np.int64)
        self._faults = 0

    @property
    def table_counters(self) -> Tensor:
        """The counters of all tables."""
        return self.counters.values[_ARENAS * _ARENA_COUNTERS :]

    def own_counters(self, table: DeviceTable) -> Tensor:
        """The counters of a table."""
        return self.table_counters[table.number * _COUNTERS : (table.number + 1) * _COUNTERS]

    def arena_counters(self, arena: RowArena) -> Tensor:
        """The counters of an arena."""
        return self.counters.values[arena.number * _ARENA_COUNTERS : (arena.number + 1) * _ARENA_COUNTERS]

    def add(self, spec: TableSpec) -> None:
        """Create a table, or do nothing if it exists."""
        known = self.tables.get(spec.name)
        if known is not None:
            if known.spec == spec:
                return
            raise ValueError(
                f"Table '{spec.name}' is in the store already as {known.spec}, but {spec} was asked for."
            )
        if spec.dim > _MOST_COLUMNS:
            raise ValueError(
                f"Table '{spec.name}': expected a dim of at most {_MOST_COLUMNS} on a GPU, got {spec.dim}: "
                'keep it in the memory of the machine, with Table(device="cpu").'
            )
        self.epoch += 1
        self.counters.resize(self.counters.values.numel() + _COUNTERS)
        layout = RowLayout(TYPES[spec.dtype], spec.dim, 0)
        table = DeviceTable(spec, len(self.tables), self.device, self.arena(layout))
        if spec.admit[0] == "min_count":
            table.filter = new_filter(spec.admit[2], self.device)
        self.tables[spec.name] = table
        whole, real = initial_numbers(spec)
        row = np.zeros(_TABLE, np.int64)
        row[fields.STREAM.value], row[fields.INIT.value] = whole[0], whole[1]
        row[fields.INIT_FIRST.value], row[fields.INIT_COUNT.value] = whole[2:]
        row[fields.ADMITS.value] = table.admits_all
        self._descriptors = np.vstack([self._descriptors, row])
        init = torch.zeros(fields.INIT_FIELDS.value, dtype=torch.float64)
        init[: len(real)] = torch.tensor(real, dtype=torch.float64)
        self.inits = torch.cat([self.inits, init.to(self.device)])
        self._states.clear()

    def arena(self, layout: RowLayout) -> RowArena:
        """The arena of a row layout."""
        if layout not in self._arenas:
            if len(self._arenas) == _ARENAS:
                raise ValueError(
                    f"A store on a GPU has at most {_ARENAS} kinds of rows, by dim, dtype and optimizer "
                    "state, got one more."
                )
            arena = RowArena(layout, self.device, self.uploads, len(self._arenas))
            self._arenas[layout] = arena
            self._arena_bounds[arena] = Bound()
            self._arena_bounds[arena].restart(1, 0)
            self.arena_counters(arena)[fields.NEXT_ROW.value] = 1
            arena.note_queue(self.arena_counters(arena))
        return self._arenas[layout]

    def set_initial_state(self, table: DeviceTable, initial: Sequence[float]) -> None:
        """The optimizer state of new rows of a table."""
        table.initial_state = tuple(initial)
        self._states.clear()
        self.epoch += 1

    def states(self, arena: RowArena) -> Tensor:
        """The optimizer state of a new row of each table, for those whose rows are in an arena."""
        if arena not in self._states:
            made = torch.zeros(len(self.tables), max(1, arena.layout.state))
            for table in self.tables.values():
                if table.arena is arena and arena.layout.state:
                    made[table.number] = torch.tensor(table.initial_state)
            self._states[arena] = made.to(self.device)
        return self._states[arena]

    def descriptors(self) -> NDArray[np.int64]:
        """The descriptors of all tables, as they are now."""
        rows = self._descriptors
        for table in self.tables.values():
            index, row = table.index, rows[table.number]
            row[fields.INDEX.value] = index.entries.data_ptr()
            row[fields.MASK.value] = index.slots - 1
            row[fields.OLD_INDEX.value] = 0 if index.old is None else index.old.data_ptr()
            row[fields.OLD_MASK.value] = index.old_slots - 1
            row[fields.VERSION.value] = table.version
        return rows

    def reserve(self, arena: RowArena, wanted: Mapping[DeviceTable, int]) -> None:
        """Have room for so many new rows of tables of an arena."""
        bound = self._arena_bounds[arena]
        positions = sum(wanted.values())
        if bound.value + positions > arena.capacity:
            try:
                arena.reserve(bound.value + positions)
            except torch.OutOfMemoryError:
                self.learn_now()  # perhaps there are fewer rows than there might be
                torch.cuda.empty_cache()
                arena.reserve(bound.value + positions)
            if arena.has_queue:
                arena.reserve_queue(self.arena_counters(arena))
        for table, count in wanted.items():
            index = table.index
            if index.grows:
                self._move(table, count)
            if index.is_full(table.used.value + count):
                self.finish_growth(table)
                index.start_growth(table.rows.value + count)
                self.own_counters(table)[fields.USED.value] = 0
                table.used.restart(table.rows.value, 1 << 62)
                self._move(table, count)

    def _move(self, table: DeviceTable, least: int) -> None:
        index = table.index
        assert index.old is not None
        first, count = index.next_move(4 * least)
        move_slots[launch.blocks(count)](
            index.old.data_ptr(),
            index.old_slots - 1,
            index.entries.data_ptr(),
            index.slots - 1,
            self.table_counters,
            table.number,
            self.spare.data_ptr(),
            first,
            count,
            WIDTH=WIDTH,
        )
        if index.moved == index.old_slots + 1:
            index.end_growth()
            table.used.restart(table.used.value, self.counters.time + 1)

    def finish_growth(self, table: DeviceTable) -> None:
        """Move all slots that still have to be moved."""
        while table.index.grows:
            self._move(table, table.index.old_slots)

    def note_lookup(self, arena: RowArena, wanted: Mapping[DeviceTable, int]) -> None:
        """A lookup that may have inserted so many rows was queued."""
        time = self.counters.request()
        self._arena_bounds[arena].add(sum(wanted.values()), time)
        for table, positions in wanted.items():
            table.used.add(positions, time)
            table.rows.add(positions, time)

    def poll(self) -> None:
        """Learn what the device has reported so far."""
        before = self.counters.known_time
        numbers = self.counters.poll()
        if self.counters.known_time != before:
            self._learn(numbers)

    def learn_now(self) -> NDArray[np.int64]:
        """Wait for the device, and learn all numbers as they are; returns the tables' counters."""
        return self._learn(self.counters.read())

    def _learn(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        time = self.counters.known_time
        faults = 0
        for arena, bound in self._arena_bounds.items():
            own = numbers[arena.number * _ARENA_COUNTERS :]
            bound.learn(int(own[fields.NEXT_ROW.value]), time)
            faults += int(own[fields.FAULTS.value])
        of_tables = numbers[_ARENAS * _ARENA_COUNTERS :]
        for table in self.tables.values():
            table.learn(of_tables, time)
        if faults > self._faults:
            self._faults = faults
            raise ValueError(
                "A batch of the last steps had wrong offsets, found on the GPU: expected offsets that start "
                "at 0, do not decrease, and end at the number of ids. Ragged.validate() says which are wrong."
            )
        return of_tables

    def settle_queue(self, arena: RowArena) -> None:
        """After rows were taken: the queue of free rows does not begin behind its end."""
        own = self.arena_counters(arena)
        head, tail = fields.FREE_HEAD.value, fields.FREE_TAIL.value
        own[head : head + 1] = torch.minimum(own[head : head + 1], own[tail : tail + 1])

    def bytes(self, table: DeviceTable) -> int:
        """Memory of a table: its rows, its index, its filter and its log."""
        filter_bytes = 0 if table.filter is None else 4 * table.filter.numel()
        row = table.arena.row_bytes
        return table.rows.value * row + table.index.bytes + filter_bytes + table.erasures.bytes
