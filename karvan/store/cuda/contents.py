"""The rows of a device table outside of training steps: list, read, load, erase and evict them.

These wait for the device where they must know how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.arena import RowArena, RowLayout, TieredArena
from karvan.store.cuda.kernels import exchange, maintenance
from karvan.store.cuda.table_memory import DeviceTable, TableMemory
from karvan.store.types import Keys, Rows

# Rows on their way from a device to the host, as they are in memory, through two page-locked buffers.
#
# While the host takes rows out of one buffer, the device fills the other one. Vectors become float32 on the
# host: those of 16 bits cross as such.


_STAGED_BYTES = 64 << 20  # of one buffer

Words: TypeAlias = NDArray[np.int32]  # a row of memory in each row
# Queues the copy of rows [first, first + count) into a buffer; returns an event after it, on a GPU.
Fill: TypeAlias = Callable[[Tensor, int, int], torch.cuda.Event | None]


class RowStaging:
    """Buffers for at most `rows` rows at a time; copies: the stream that they are copied on, of a GPU."""

    def __init__(
        self, device: torch.device, layout: RowLayout, rows: int, copies: torch.cuda.Stream | None
    ) -> None:
        most = max(16, _STAGED_BYTES // layout.stride // 16 * 16)  # slices of the list stay aligned
        self.rows = max(1, min(rows, most))
        shape = (self.rows, layout.stride // 4)
        buffers = 1 if rows <= self.rows else 2
        self._on_device = [torch.empty(shape, dtype=torch.int32, device=device) for _ in range(buffers)]
        self._on_host = self._on_device
        self._copies = copies
        self._arrived: list[torch.cuda.Event] = []
        if copies is not None:
            self._on_host = [torch.empty(shape, dtype=torch.int32, pin_memory=True) for _ in range(buffers)]
            self._arrived = [torch.cuda.Event() for _ in range(buffers)]  # type: ignore[no-untyped-call]
            for buffer in self._on_device:
                buffer.record_stream(copies)

    def read(self, count: int, fill: Fill) -> Iterator[tuple[int, Words]]:
        """The rows [0, count) in pieces: (the first one, the rows), valid until the next piece is taken."""
        buffers = len(self._on_device)
        pieces = [(first, min(self.rows, count - first)) for first in range(0, count, self.rows)]
        for number, (first, size) in enumerate(pieces):
            if number >= buffers:
                yield self._take(pieces, number - buffers)
            self._send(number % buffers, size, fill(self._on_device[number % buffers], first, size))
        for number in range(max(0, len(pieces) - buffers), len(pieces)):
            yield self._take(pieces, number)

    def _send(self, buffer: int, size: int, filled: torch.cuda.Event | None) -> None:
        if self._copies is None:
            return
        assert filled is not None
        self._copies.wait_event(filled)
        with torch.cuda.stream(self._copies):
            self._on_host[buffer][:size].copy_(self._on_device[buffer][:size], non_blocking=True)
            self._arrived[buffer].record()

    def _take(self, pieces: list[tuple[int, int]], number: int) -> tuple[int, Words]:
        first, size = pieces[number]
        buffer = number % len(self._on_device)
        if self._copies is not None:
            self._arrived[buffer].synchronize()
        return first, self._on_host[buffer][:size].numpy()


def unpack(words: Words, layout: RowLayout, vectors: NDArray[np.float32], state: NDArray[np.float32]) -> None:
    """Write the vectors and the optimizer state of rows into arrays."""
    halves = words.view(np.uint16)[:, : layout.dim]
    if layout.type == 0:
        vectors[:] = words.view(np.float32)[:, : layout.dim]
    elif layout.type == 1:
        vectors[:] = (halves.astype(np.uint32) << 16).view(np.float32)
    else:
        with np.errstate(invalid="ignore"):  # rows that others fill later may be anything
            vectors[:] = halves.view(np.float16)
    first = layout.vector // 4
    state[:] = words.view(np.float32)[:, first : first + layout.state]


_SIGN = -(1 << 63)
_MOST_COLUMNS = 1024  # words of a row that a program copies at a time
_LOGGED = 1 << 20  # hashes of removed keys that a table remembers at least


class RowFields(NamedTuple):
    """Rows of a table: their numbers and what is noted of each."""

    rows: Tensor
    hashes: Tensor
    counts: Tensor
    lasts: Tensor
    changes: Tensor


def list_rows(memory: TableMemory, table: DeviceTable, low: int = 0, high: int = 2**64 - 1) -> RowFields:
    """The rows whose hash, as unsigned, lies in [low, high], in the order of their hashes."""
    index = table.index
    memory.finish_growth(table)
    most = index.slots + 1
    listed = torch.zeros(1, dtype=torch.int64, device=memory.device)
    bound = min(most, memory.rows_bound(table))
    hashes = torch.empty(bound, dtype=torch.int64, device=memory.device)
    rows = torch.empty(bound, dtype=torch.int32, device=memory.device)
    limits = memory.uploads.send(np.array([low, high], np.uint64).view(np.int64))
    for first, count, special in ((0, index.slots, False), (index.slots, 1, True)):
        maintenance.list_slots[launch.blocks(count)](
            index.entries.data_ptr(), first, count, listed, hashes, rows, limits, SPECIAL=special
        )
    count = int(listed.item())
    hashes, order = torch.sort(hashes[:count] ^ _SIGN)
    return read_fields(memory, table, rows[:count][order].contiguous())


def read_fields(memory: TableMemory, table: DeviceTable, rows: Tensor) -> RowFields:
    """What is noted of rows."""
    arena, count = table.arena, rows.numel()
    hashes = torch.empty(count, dtype=torch.int64, device=memory.device)
    counts, lasts, changes = (torch.empty(count, dtype=torch.int32, device=memory.device) for _ in range(3))
    if count:
        fields = (hashes, counts, lasts, changes)
        maintenance.read_fields[launch.blocks(count)](
            rows, count, arena.chunks, *fields, **arena.constants("SHIFT", "STRIDE")
        )
    return RowFields(rows, hashes, counts, lasts, changes)


def read_vectors(memory: TableMemory, table: DeviceTable, rows: Tensor) -> Tensor:
    """The vectors of rows, on the device."""
    arena, layout, count = table.arena, table.arena.layout, rows.numel()
    vectors = torch.empty(count, layout.dim, dtype=torch.float32, device=memory.device)
    if count:
        tile = launch.tile(layout.columns)
        constants = arena.constants("DIM", "COLUMNS", "SHIFT", "STRIDE", "TYPE")
        maintenance.read_vectors[(-(-count // tile["GROUP"]),)](
            rows, count, arena.chunks, vectors, **constants, **tile
        )
    return vectors


def host_bytes(memory: TableMemory, table: DeviceTable) -> int:
    """Bytes of a table's rows that are in host memory; waits for the device."""
    arena = table.arena
    if not isinstance(arena, TieredArena) or not arena.has_host_rows:
        return 0
    memory.finish_growth(table)
    count = torch.zeros(1, dtype=torch.int64, device=memory.device)
    slots = table.index.slots + 1
    exchange.count_places[launch.blocks(slots)](table.index.entries.data_ptr(), slots, arena.places, count)
    return (memory.rows_bound(table) - int(count.item())) * arena.row_bytes


def to_host(memory: TableMemory, table: DeviceTable, noted: RowFields) -> Rows:
    """Rows with all they have, in host memory."""
    arena, count, layout = table.arena, noted.rows.numel(), table.arena.layout
    vectors = np.empty((count, layout.dim), np.float32)
    state = np.empty((count, layout.state), np.float32)

    def fill(buffer: Tensor, first: int, size: int) -> torch.cuda.Event | None:
        constants, rows = copy_constants(arena), noted.rows[first : first + size]
        maintenance.copy_rows[(-(-size // constants["GROUP"]),)](
            rows, size, arena.chunks, buffer.data_ptr(), **constants
        )
        return torch.cuda.current_stream(memory.device).record_event() if buffer.is_cuda else None

    if count:
        staging = RowStaging(memory.device, layout, count, memory.streams.copies)
        for first, words in staging.read(count, fill):
            some = slice(first, first + len(words))
            unpack(words, layout, vectors[some], state[some])
    return Rows(
        unmix(noted.hashes.cpu().numpy()),
        vectors,
        state,
        noted.counts.cpu().numpy().view(np.uint32),
        noted.lasts.cpu().numpy().view(np.uint32),
    )


def copy_constants(arena: RowArena) -> dict[str, int]:
    """How kernels copy rows as they are in memory: where rows are, and the shape of a block."""
    columns = min(launch.power(arena.layout.stride // 4), _MOST_COLUMNS)
    return {**arena.constants("SHIFT", "STRIDE"), "COLUMNS": columns, **launch.tile(columns)}


def load_rows(memory: TableMemory, table: DeviceTable, rows: Rows) -> None:
    """Insert or overwrite rows."""
    count = len(rows.keys)
    version = table.next_version()
    if not count:
        return
    memory.reserve(table.arena, {table: count})
    memory.finish_growth(table)
    arena, device = table.arena, memory.device
    memory.note_lookup({table: count})
    numbers = torch.empty(count, dtype=torch.int32, device=device)
    index, keys = table.index, torch.from_numpy(np.ascontiguousarray(rows.keys)).to(device)
    slots = (index.entries.data_ptr(), index.slots - 1, keys, count, memory.table_counters, table.number)
    maintenance.insert_keys[launch.blocks(count)](
        *(*slots, memory.arena_counters(arena), arena.chunks, version, memory.spare.data_ptr(), numbers),
        **arena.constants("SHIFT", "STRIDE"),
    )
    memory.settle_queue(arena)
    for watcher in arena.watchers:
        watcher.save(numbers, count)
    floats, fields = (rows.vectors, rows.state), (rows.counts, rows.last_steps)
    arrays = [np.ascontiguousarray(array, np.float32) for array in floats]
    arrays += [np.ascontiguousarray(array, np.uint32).view(np.int32) for array in fields]
    tile = launch.tile(max(arena.layout.columns, arena.layout.states))
    maintenance.write_rows[(-(-count // tile["GROUP"]),)](
        *(numbers, count, arena.chunks, *(torch.from_numpy(array).to(device) for array in arrays), version),
        **arena.constants("DIM", "STATE", "COLUMNS", "STATES", "SHIFT", "STRIDE", "VECTOR", "TYPE"),
        **tile,
    )


def erase_hashes(memory: TableMemory, table: DeviceTable, hashes: Tensor, *, log: bool = True) -> int:
    """Remove the rows of distinct hashes; returns how many there were. log: whether the table notes them."""
    count = hashes.numel()
    if not count:
        return 0
    memory.finish_growth(table)
    arena, index = table.arena, table.index
    places = torch.empty(count, dtype=torch.int64, device=memory.device)
    rows = torch.empty_like(places)
    maintenance.find_places[launch.blocks(count)](
        index.entries.data_ptr(), index.slots - 1, hashes, count, places, rows
    )
    for watcher in arena.watchers:
        watcher.save(rows, count)
    arena.reserve_queue(memory.arena_counters(arena))
    counters = (memory.table_counters, table.number, memory.arena_counters(arena))
    maintenance.erase_places[launch.blocks(count)](
        places, rows, count, *counters, arena.chunks, **arena.constants("SHIFT", "STRIDE")
    )
    hashes_in_use = hashes[rows > 0]
    if log:
        table.erasures.add(table.next_version(), hashes_in_use, max(_LOGGED, memory.rows_bound(table)))
    memory.learn_now()
    return int(hashes_in_use.numel())


def unmix(hashes: Keys) -> Keys:
    """The keys of hashes, both int64; csrc/hash/mix.h."""
    return _scrambled(hashes, 0xCFEE444D8B59A89B)


def mix(keys: Keys) -> Keys:
    """The hashes of keys, both int64."""
    return _scrambled(keys, 0xD6E8FEB86659FD93)


def _scrambled(numbers: Keys, factor: int) -> Keys:
    h = np.ascontiguousarray(numbers).view(np.uint64).copy()
    for _ in range(2):
        h ^= h >> np.uint64(32)
        h *= np.uint64(factor)
    h ^= h >> np.uint64(32)
    return h.view(np.int64)


def erased_keys(table: DeviceTable, version: int) -> Keys:
    """Keys whose rows were removed after a version."""
    if version < table.erasures.forgotten:
        raise ValueError(
            f"Table '{table.spec.name}' remembers evictions since version {table.erasures.forgotten}, but "
            f"was asked for version {version}: take a full snapshot instead."
        )
    erased = table.erasures.since(version)
    return unmix(np.zeros(0, np.int64) if erased is None else erased.cpu().numpy())


# Eviction on the device: which rows a table's policy removes; csrc/table/evict.cpp has the same rules.
#
# A table with a capacity must evict after a lookup that has brought more rows than that, which the host
# cannot know at once. It looks before the next call that meets the table's rows (`settle`), mostly the
# update: by then the model is queued behind the lookup, so the device is busy while the host waits.

_LARGE = 65536  # a capacity from which a sixteenth is removed at once


def maintain(memory: TableMemory, table: DeviceTable, step: int, now: float) -> None:
    """What the policy asks for after the training lookup of a step."""
    kind, value, every = table.spec.evict
    if kind in ("lru", "lfu"):
        if memory.rows_bound(table) > value:
            memory.request_numbers()
            memory.overdue[table] = None
    elif kind == "ttl":
        time = table.advance_time(now)
        if step % every == 0:
            _evict_expired(memory, table, time)
        clock = table.clock
        while len(clock) > 1 and clock[1][1] <= time - value:
            clock.pop(0)
        if len(clock) > 1 and time - clock[-2][1] < value / 64:
            clock[-1] = (step, time)
        else:
            clock.append((step, time))
    elif kind != "never" and step % every == 0:
        evict(memory, table, step, now)


def settle(memory: TableMemory) -> None:
    """Evict rows beyond capacities; waits for the last lookup, not for what is queued behind it."""
    if not memory.overdue:
        return
    memory.learn_requested()
    for table in list(memory.overdue):
        del memory.overdue[table]
        _evict_beyond(memory, table)


def evict(memory: TableMemory, table: DeviceTable, step: int, now: float) -> int:
    """Apply the policy now."""
    kind, value, _ = table.spec.evict
    if kind in ("lru", "lfu"):
        memory.learn_now()
        return _evict_beyond(memory, table)
    if kind == "age":
        if step <= value:
            return 0
        noted = list_rows(memory, table)
        return erase_hashes(memory, table, noted.hashes[_unsigned(noted.lasts) < step - int(value)])
    if kind == "ttl":
        return _evict_expired(memory, table, table.advance_time(now))
    if kind == "norm":
        noted = list_rows(memory, table)
        vectors = read_vectors(memory, table, noted.rows)
        limit = float(torch.tensor(value, dtype=torch.float32)) ** 2
        return erase_hashes(memory, table, noted.hashes[vectors.double().square().sum(1) < limit])
    return 0


def _evict_beyond(memory: TableMemory, table: DeviceTable) -> int:
    """Remove the rows beyond the capacity of a table, whose number is known.

    The first are those with the least (last use, uses), or (uses, last use) for LFU, then hash.
    """
    kind, value, _ = table.spec.evict
    capacity, present = int(value), memory.rows_bound(table)
    if present <= capacity:
        return 0
    spare = capacity // 16 if capacity >= _LARGE else 0
    noted = list_rows(memory, table)  # in the order of hashes, which a stable sort keeps
    first, second = (noted.counts, noted.lasts) if kind == "lfu" else (noted.lasts, noted.counts)
    rank = ((_unsigned(first) << 32) | _unsigned(second)) ^ _SIGN
    least = torch.sort(rank, stable=True).indices[: present - capacity + spare]
    return erase_hashes(memory, table, noted.hashes[least].contiguous())


def _evict_expired(memory: TableMemory, table: DeviceTable, time: float) -> int:
    seconds = table.spec.evict[1]
    expired = max((step + 1 for step, noted in table.clock if noted <= time - seconds), default=0)
    if not expired:
        return 0
    noted = list_rows(memory, table)
    return erase_hashes(memory, table, noted.hashes[_unsigned(noted.lasts) < expired])


def _unsigned(numbers: Tensor) -> Tensor:
    return numbers.long() & 0xFFFFFFFF
