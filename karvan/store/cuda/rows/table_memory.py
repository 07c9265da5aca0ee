"""`TableMemory`: the tables of a store on a device, and the memory of their rows and indexes.

Kernels find everything by addresses and numbers that lie in device memory themselves (`kernels/fields.py`),
so the same launches, or a graph of them, serve every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.find import SPARE_LANES, move_slots
from karvan.store.cuda.launch import take_turns
from karvan.store.cuda.rows.arena import TYPES, Bound, RowArena, RowLayout, RowSpace
from karvan.store.cuda.rows.index import WIDTH
from karvan.store.cuda.rows.initial_values import initial_numbers
from karvan.store.cuda.rows.tables import DeviceTable
from karvan.store.cuda.tier.arena import TieredArena
from karvan.store.cuda.tier.host_memory import DeviceBudget, TierStream
from karvan.store.cuda.transfers import Counters, DeviceStreams, Uploads
from karvan.store.types import TableSpec

# The counters of `MinCount`: how often keys without a row have been seen; csrc/table/admission_filter.h.


def new_filter(slots: int, device: torch.device) -> Tensor:
    """The counters of a filter, all 0. They are wider than the CPU's, and read as at most 255."""
    blocks = (max(slots, 1) + 64 * 256 - 1) // (64 * 256) * 256
    return torch.zeros(blocks * 64, dtype=torch.int32, device=device)


_TABLE = fields.TABLE_FIELDS.value
_COUNTERS = fields.COUNTERS.value
_ARENA_COUNTERS = fields.ARENA_COUNTERS.value
_ARENAS = 64  # row layouts that a store may have
_MOST_COLUMNS = 4096
_NEVER = 1 << 62
_AHEAD = 3  # batches that there is memory for if there must be more: the host may be ahead of the device
_PROGRAMS = 16  # of a kernel that divides work of unknown size, for each multiprocessor
_UPDATE_PROGRAMS = 16 * _PROGRAMS  # of an update, which waits for memory alone
_INTERPRETER_PROGRAMS = 2  # on "cpu" they run one after the other: just enough that work is divided


class TableMemory:
    """Tables by name, arenas by row layout, and what the host knows of both.

    device_memory: the most bytes that rows take on the device; others are in host memory. None: all are here.
    """

    def __init__(self, device: torch.device, device_memory: int | None = None) -> None:
        self.device = device
        self.budget = None if device_memory is None else DeviceBudget(device_memory)
        self.tier = TierStream(device, used=self.budget is not None)
        self.uploads = Uploads(device)
        self.counters = Counters(device, _ARENAS * _ARENA_COUNTERS)
        self.spare = torch.zeros(2 * SPARE_LANES.value, dtype=torch.int64, device=device)
        self.empty = torch.zeros(1, dtype=torch.int32, device=device)
        self.inits = torch.zeros(0, dtype=torch.float64, device=device)
        self.streams = DeviceStreams(device)
        self.processors = 0
        self.programs = self.update_programs = _INTERPRETER_PROGRAMS
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.programs = _PROGRAMS * self.processors
            self.update_programs = _UPDATE_PROGRAMS * self.processors
        else:
            take_turns()
        self.tables: dict[str, DeviceTable] = {}
        self.overdue: dict[DeviceTable, None] = {}  # tables that may have more rows than their capacity
        self.epoch = 0  # grows when memory that graphs point to has been replaced
        self._arenas: dict[RowLayout, RowArena] = {}
        self._lookups: deque[tuple[int, Mapping[DeviceTable, int]]] = deque()
        self._states: dict[RowSpace, Tensor] = {}
        self._descriptors = np.zeros((0, _TABLE), np.int64)
        self._faults = 0
        self._checked_time = 0  # of the counters whose faults were looked at

    @property
    def table_counters(self) -> Tensor:
        """The counters of all tables."""
        return self.counters.values[_ARENAS * _ARENA_COUNTERS :]

    def own_counters(self, table: DeviceTable) -> Tensor:
        """The counters of a table."""
        return self.table_counters[table.number * _COUNTERS : (table.number + 1) * _COUNTERS]

    def arena_counters(self, arena: RowSpace) -> Tensor:
        """The counters of an arena."""
        return self.counters.values[arena.number * _ARENA_COUNTERS : (arena.number + 1) * _ARENA_COUNTERS]

    def add(self, spec: TableSpec) -> None:
        """Create a table, or do nothing if it exists."""
        memory = self.tables.get(spec.name)
        if memory is not None:
            if memory.spec == spec:
                return
            raise ValueError(
                f"Table '{spec.name}' is in the store already as {memory.spec}, but {spec} was asked for."
            )
        if spec.dim > _MOST_COLUMNS:
            raise ValueError(
                f"Table '{spec.name}': expected a dim of at most {_MOST_COLUMNS} on a GPU, got {spec.dim}: "
                'keep it in the memory of the machine, with Table(device="cpu").'
            )
        self.epoch += 1
        self.tier.join()  # it adds to the counters
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
            self._arenas[layout] = arena = self._new_arena(layout)
            time = self.counters.time
            arena.used.restart(1, time, time + 1)  # copies of the counters so far have no row 0
            self.arena_counters(arena)[fields.NEXT_ROW.value].fill_(1)
            arena.note_queue(self.arena_counters(arena))
        return self._arenas[layout]

    def _new_arena(self, layout: RowLayout) -> RowArena:
        if self.budget is None:
            return RowArena(layout, self.device, self.uploads, len(self._arenas))
        return TieredArena(layout, self.device, self.uploads, len(self._arenas), self.tier)

    def set_initial_state(self, table: DeviceTable, initial: Sequence[float]) -> None:
        """The optimizer state of new rows of a table."""
        table.initial_state = tuple(initial)
        self._states.clear()
        self.epoch += 1

    def states(self, arena: RowSpace) -> Tensor:
        """The optimizer state of a new row of each table, for those whose rows are in an arena."""
        if arena not in self._states:
            initial = torch.zeros(len(self.tables), max(1, arena.layout.state))
            for table in self.tables.values():
                if table.arena is arena and arena.layout.state:
                    initial[table.number] = torch.tensor(table.initial_state)
            self._states[arena] = initial.to(self.device)
        return self._states[arena]

    def descriptors(self) -> NDArray[np.int64]:
        """The descriptors of all tables, as they are now."""
        rows = self._descriptors
        for table in self.tables.values():
            index = table.index
            if not index.described:
                index.describe(rows[table.number])
        rows[:, fields.VERSION.value] = [table.version for table in self.tables.values()]
        return rows

    def reserve(self, arena: RowArena, wanted: Mapping[DeviceTable, int]) -> None:
        """Have room for so many new rows of tables of an arena.

        Mostly there is room from before: the host counts positions down, and looks at bounds when it is used.
        """
        positions = 0
        enough = True
        for table, count in wanted.items():
            positions += count
            table.room -= count
            enough &= table.room >= 0
        arena.room -= positions
        if enough and arena.room >= 0:
            return
        self.tier.join()  # it reads indexes
        self._refresh()
        batches = 1
        if self._lacks_room(arena, wanted, positions):  # perhaps only because the host is ahead of the device
            self.counters.catch_up()
            self._refresh()
            batches = 1 if arena.full else _AHEAD  # for more than one, or the next step waits again
        bound = self.arena_bound(arena)
        if bound + batches * positions > arena.capacity:
            try:
                self._reserve_rows(arena, bound + batches * positions)
            except torch.OutOfMemoryError:
                arena.full = True
                self.learn_now()  # perhaps there are fewer rows than there might be
                torch.cuda.empty_cache()
                bound = self.arena_bound(arena)
                self._reserve_rows(arena, bound + positions)
            if arena.has_queue:
                arena.reserve_queue(self.arena_counters(arena))
        arena.room = arena.capacity - bound - positions
        for table, count in wanted.items():
            index = table.index
            if index.grows:
                self._move(table, count)
            if index.is_full(self.used_bound(table) + batches * count):
                self.finish_growth(table)
                index.start_growth(self.rows_bound(table) + batches * count)
                self.own_counters(table)[fields.USED.value].zero_()
                table.used.restart(self.rows_bound(table), self.counters.time, _NEVER)
                self._move(table, count)
            table.room = 0 if index.grows else index.room(self.used_bound(table) + count)

    def _reserve_rows(self, arena: RowArena, rows: int) -> None:
        if isinstance(arena, TieredArena) and arena.share is None:
            assert self.budget is not None
            arena.share = self.budget.share(arena, {table.arena for table in self.tables.values()})
            self.epoch += 1  # from now on it has more device locations: their tables are replaced
        before = arena.chunks
        try:
            arena.reserve(rows)
        finally:
            if arena.chunks is not before:  # graphs point to it
                self.epoch += 1

    def _lacks_room(self, arena: RowArena, wanted: Mapping[DeviceTable, int], positions: int) -> bool:
        return self.arena_bound(arena) + positions > arena.capacity or any(
            table.index.is_full(self.used_bound(table) + count) for table, count in wanted.items()
        )

    def _move(self, table: DeviceTable, least: int) -> None:
        self.tier.join()  # it reads indexes
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
            time = self.counters.time
            table.used.restart(self.used_bound(table), time, time + 1)

    def finish_growth(self, table: DeviceTable) -> None:
        """Move all slots that still have to be moved."""
        while table.index.grows:
            self._move(table, table.index.old_slots)

    def note_lookup(self, wanted: Mapping[DeviceTable, int]) -> None:
        """A lookup that may insert so many rows is about to be queued; the next copy of counters has it."""
        self._lookups.append((self.counters.time + 1, wanted))

    def used_bound(self, table: DeviceTable) -> int:
        """The most slots of its index that a table may use."""
        return self._bound(table.used, table)

    def rows_bound(self, table: DeviceTable) -> int:
        """The most rows that a table may have."""
        return self._bound(table.rows, table)

    def arena_bound(self, arena: RowArena) -> int:
        """No row of an arena has a number from this one on."""
        return arena.used.known + sum(
            count
            for time, wanted in self._lookups
            if time > arena.used.time
            for table, count in wanted.items()
            if table.arena is arena
        )

    def _bound(self, bound: Bound, table: DeviceTable) -> int:
        later = (wanted.get(table, 0) for time, wanted in self._lookups if time > bound.time)
        return bound.known + sum(later)

    def poll(self) -> None:
        """Take what the device has reported so far; raises if it has met wrong offsets."""
        numbers = self.counters.poll()
        if self.counters.known_time != self._checked_time:
            self._check_faults(numbers)

    def request_numbers(self) -> None:
        """Have the numbers after the last lookup sent to the host, unless they are on their way."""
        if self._lookups and self._lookups[-1][0] > self.counters.time:
            self.counters.request()

    def learn_requested(self) -> None:
        """Wait for the numbers that were requested last, and learn them."""
        self.counters.catch_up()
        self._refresh()

    def learn_now(self) -> NDArray[np.int64]:
        """Wait for the device, and learn all numbers as they are; returns the tables' counters."""
        self.tier.join()
        self._check_faults(self.counters.read())
        return self._refresh()

    def _refresh(self) -> NDArray[np.int64]:
        numbers, time = self.counters.poll(), self.counters.known_time
        for arena in self._arenas.values():
            arena.used.learn(int(numbers[arena.number * _ARENA_COUNTERS + fields.NEXT_ROW.value]), time)
        of_tables = numbers[_ARENAS * _ARENA_COUNTERS :]
        for table in self.tables.values():
            table.learn(of_tables, time)
        bounds = [arena.used.time for arena in self._arenas.values()]
        bounds += [min(table.used.time, table.rows.time) for table in self.tables.values()]
        oldest = min(bounds, default=0)
        while self._lookups and self._lookups[0][0] <= oldest:
            self._lookups.popleft()
        return of_tables

    def _check_faults(self, numbers: NDArray[np.int64]) -> None:
        self._checked_time = self.counters.known_time
        first = fields.FAULTS.value
        faults = sum(int(numbers[first + a.number * _ARENA_COUNTERS]) for a in self._arenas.values())
        if faults > self._faults:
            self._faults = faults
            raise ValueError(
                "A batch of the last steps had wrong offsets, found on the GPU: expected offsets that start "
                "at 0, do not decrease, and end at the number of ids. Ragged.validate() says which are wrong."
            )

    def settle_queue(self, arena: RowArena) -> None:
        """After rows were taken: the queue of free rows does not begin behind its end."""
        counters = self.arena_counters(arena)
        head, tail = fields.FREE_HEAD.value, fields.FREE_TAIL.value
        counters[head : head + 1] = torch.minimum(counters[head : head + 1], counters[tail : tail + 1])

    def bytes(self, table: DeviceTable) -> int:
        """Memory of a table: its rows, its index, its filter and its log."""
        filter_bytes = 0 if table.filter is None else 4 * table.filter.numel()
        row = table.arena.row_bytes
        return self.rows_bound(table) * row + table.index.bytes + filter_bytes + table.erasures.bytes
