"""`TableMemory`: the tables of a store on a device, and the memory of their rows and indexes.

Kernels find everything by addresses and numbers that lie in device memory themselves (`kernels/fields.py`),
so the same launches, or a graph of them, serve every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.arena import (
    TYPES,
    Bound,
    DeviceBudget,
    HostMemoryError,
    RowArena,
    RowLayout,
    RowSpace,
    TieredArena,
    TierStream,
)
from karvan.store.cuda.initial_values import initial_numbers
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.find import SPARE_LANES, WIDTH, move_slots
from karvan.store.cuda.launch import Counters, DeviceStreams, Uploads, take_turns
from karvan.store.types import TableSpec

# `KeyIndex`: from the hashes of one table's keys to row numbers, in device memory, growing step by step.

_LEAST = 256  # slots
_LOAD = 0.6  # more used slots than this share of all, and the index grows
_MOVED = 1 << 19  # slots that one step moves at least


class KeyIndex:
    """Slots of (hash, row). While it grows, keys are in the new index or still in the old one."""

    def __init__(self, device: torch.device, slots: int = _LEAST, load: float = _LOAD) -> None:
        self._device = device
        self._load = load
        self.slots = slots
        self.entries = self._empty(slots)
        self.old: torch.Tensor | None = None
        self.old_slots = 0
        self.moved = 0  # slots of the old index, so far
        self.moved_in_all = 0
        self.described = False  # whether the table's descriptor has the addresses

    def _empty(self, slots: int) -> torch.Tensor:
        return torch.zeros(2 * (slots + WIDTH.value), dtype=torch.int64, device=self._device)

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return 8 * (self.entries.numel() + (0 if self.old is None else self.old.numel()))

    @property
    def grows(self) -> bool:
        """Whether an old index still has keys."""
        return self.old is not None

    def describe(self, row: NDArray[np.int64]) -> None:
        """Write addresses and sizes into the table's descriptor."""
        row[fields.INDEX.value] = self.entries.data_ptr()
        row[fields.MASK.value] = self.slots - 1
        row[fields.OLD_INDEX.value] = 0 if self.old is None else self.old.data_ptr()
        row[fields.OLD_MASK.value] = self.old_slots - 1
        self.described = True

    def is_full(self, used: int) -> bool:
        """Whether so many used slots are too many."""
        return used > self._load * self.slots

    def room(self, used: int) -> int:
        """How many more slots than `used` may be used before it is full."""
        return int(self._load * self.slots) - used

    def start_growth(self, keys: int) -> None:
        """Make a larger index, for so many keys and as many more; the slots of this one move later."""
        assert self.old is None
        slots = self.slots
        while keys > self._load / 2 * slots:
            slots *= 2
        self.old, self.old_slots, self.moved = self.entries, self.slots, 0
        self.entries, self.slots = self._empty(slots), slots
        self.described = False

    def next_move(self, least: int) -> tuple[int, int]:
        """The slots of the old index to move now: the first, and how many."""
        first = self.moved
        count = min(max(_MOVED, least), self.old_slots + 1 - first)
        self.moved += count
        self.moved_in_all += count
        return first, count

    def end_growth(self) -> None:
        """Release the old index, whose slots have all been moved."""
        assert self.moved == self.old_slots + 1
        self.old = None
        self.described = False


_INIT_LEVELS = {"normal": 1, "truncated_normal": 1, "gamma": 2, "poisson": 2}


class DeviceTable:
    """A table: its settings, its index, and the arena of its rows."""

    def __init__(self, spec: TableSpec, number: int, device: torch.device, arena: RowArena) -> None:
        self.spec = spec
        self.number = number  # among the store's tables
        self.arena = arena
        self.index = KeyIndex(device)
        self.initial_state: tuple[float, ...] = ()
        self.version = 0
        self.used = Bound()
        self.rows = Bound()
        self.room = 0  # positions that lookups may still have before the host must look at the bounds
        self.erasures = ErasureLog()
        self.filter: torch.Tensor | None = None  # counters of keys without a row, for MinCount
        self.checked_rule = ("", arena)  # the kind of rule that its rows are known to have the state for
        self.captured = False  # whether a capture of it is open
        self.skipped = 0  # updates that were skipped by the host
        self.clock: list[tuple[int, float]] = []  # for TTL: (step, time) now and then
        self._time = self._shown = 0.0

    @property
    def admits_all(self) -> bool:
        """Whether every key gets a row."""
        return self.spec.admit[0] == "always"

    @property
    def init_level(self) -> int:
        """How much the kernel that fills rows must know: 1 with normals, 2 also with gamma and Poisson."""
        return _INIT_LEVELS.get(self.spec.init[0], 0)

    def learn(self, counters: NDArray[np.int64], time: int) -> None:
        """What the host has read of the table's counters."""
        counters_of_table = counters[self.number * fields.COUNTERS.value :]
        self.used.learn(int(counters_of_table[fields.USED.value]), time)
        self.rows.learn(int(counters_of_table[fields.ROWS.value]), time)

    def next_version(self) -> int:
        """The version after a change; see `next_versions`."""
        next_versions([self])
        return self.version

    def move_to(self, arena: RowArena) -> None:
        """Have rows in another arena from now on."""
        self.arena = arena
        arena.newest_version = max(arena.newest_version, self.version)

    def advance_time(self, now: float) -> float:
        """The table's time, which does not fall when the clock was set back."""
        latest = max(self._time, self.clock[-1][1]) if self.clock else self._time
        self._time = now if now >= latest else latest + max(0.0, now - self._shown)
        self._shown = now
        return self._time


def next_versions(tables: Iterable[DeviceTable]) -> None:
    """Give tables their version after a change, which those of one arena share.

    Versions grow over all tables of an arena, as their rows' births do: a row that one table has released and
    another has got since is then known to be another one.
    """
    done: dict[RowArena, int] = {}
    for table in tables:
        arena = table.arena
        if arena not in done:
            arena.newest_version += 1
            done[arena] = arena.newest_version
        table.version = done[arena]


class ErasureLog:
    """Hashes of removed keys, by version. Beyond `most`, the oldest are forgotten."""

    def __init__(self) -> None:
        self._log: deque[tuple[int, torch.Tensor]] = deque()
        self._total = 0
        self.newest = 0
        self.forgotten = 0

    def add(self, version: int, hashes: torch.Tensor, most: int) -> None:
        """Keys were removed."""
        if not hashes.numel():
            return
        self.newest = version
        self._log.append((version, hashes))
        self._total += hashes.numel()
        while self._total > most and len(self._log) > 1:
            self.forgotten, keys = self._log.popleft()
            self._total -= keys.numel()

    def since(self, version: int) -> torch.Tensor | None:
        """The hashes of keys that were removed after a version; None if there are none."""
        erased = [hashes for at, hashes in self._log if at > version]
        return torch.cat(erased) if erased else None

    @property
    def bytes(self) -> int:
        """Memory of the log."""
        return 8 * self._total


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
        whole, real = initial_numbers(spec, self.device)
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
            settings = (layout, self.device, self.uploads, len(self._arenas))
            arena = RowArena(*settings) if self.budget is None else TieredArena(*settings, self.tier)
            self._arenas[layout] = arena
            time = self.counters.time
            arena.used.restart(1, time, time + 1)  # copies of the counters so far have no row 0
            self.arena_counters(arena)[fields.NEXT_ROW.value].fill_(1)
            arena.note_queue(self.arena_counters(arena))
        return self._arenas[layout]

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
        slots = (index.old.data_ptr(), index.old_slots - 1, index.entries.data_ptr(), index.slots - 1)
        counters = (self.table_counters, table.number)
        move_slots[launch.blocks(count)](*slots, *counters, self.spare.data_ptr(), first, count)
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


# What to say when the GPU or the machine has no more memory: which tables there are, and how large.


@contextmanager
def memory_report(memory: TableMemory) -> Iterator[None]:
    """Within it, an error of a full GPU or machine names the tables and their sizes."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        sizes = sorted(
            ((memory.bytes(table), table.spec.name, table) for table in memory.tables.values()), reverse=True
        )
        listed = ", ".join(
            f"{name} ({size / 2**30:.2f} GiB, {memory.rows_bound(table):,} rows)"
            for size, name, table in sizes[:10]
        )
        more = f" and {len(sizes) - 10} more" if len(sizes) > 10 else ""
        if isinstance(error, HostMemoryError):
            raise HostMemoryError(
                f"There is no memory left on the machine for rows beyond device_memory: {error}. Tables: "
                f"{listed}{more}. Limit tables by evict=kv.eviction.LRU(…), or train on several machines "
                'with kv.connect("sharded", device="cuda").'
            ) from error
        free, total = torch.cuda.mem_get_info(memory.device)
        advice = 'give rows less of it by kv.connect("cuda", device_memory="…")'
        if memory.budget is None:
            advice = (
                'keep the rows that are used least in the memory of the machine by kv.connect("cuda", '
                'device_memory="…"), or some tables by Table(device="cpu")'
            )
        raise torch.OutOfMemoryError(
            f"There is no memory left on {memory.device} for more rows: {free / 2**30:.2f} of "
            f"{total / 2**30:.2f} GiB are free. Tables: {listed}{more}. Limit tables by "
            f'evict=kv.eviction.LRU(…), {advice}, or train on several GPUs with kv.connect("sharded").'
        ) from error
