"""The memory of rows: `RowArena` on a device, in chunks that never move; `TieredArena`, partly on the host.

An arena has the rows of one layout, for all tables that have it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from typing_extensions import override

from karvan.store.cuda.kernels import exchange, fields
from karvan.store.cuda.launch import Uploads

# Memory of the machine that a GPU reads and writes directly: page-locked, at the addresses of the host.

_KEPT = 16  # one part in so many of what is available stays for the rest of the machine
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


class HostMemoryError(torch.OutOfMemoryError):
    """There is no memory left on the machine."""


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """Memory of the machine for the kernels of a device; raises HostMemoryError if there is none.

    Linux gives out more memory than it has, and ends a process that uses it; so what is left is read first.
    """
    free = available_bytes()
    if free is not None and size > free - free // _KEPT:
        raise HostMemoryError(
            f"{size / 2**30:.2f} GiB more are needed, and {free / 2**30:.2f} GiB of the machine are available"
        )
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError as error:  # of the CUDA driver, which has a limit of its own
        raise HostMemoryError(f"{size / 2**30:.2f} GiB more cannot be page-locked: {error}") from error


def available_bytes() -> int | None:
    """How much memory this process can still get, by the machine and by its control group; None: unknown."""
    sizes = [
        int(line.split()[1]) << 10
        for line in (_MEMORY.read_text().splitlines() if _MEMORY.exists() else [])
        if line.startswith("MemAvailable:")
    ]
    try:
        most, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        sizes.append(max(0, most - used + cached))
    except (OSError, ValueError):  # no such group, or a limit of "max"
        pass
    return min(sizes, default=None)


# `DeviceBudget`: the GPU memory that rows may take, divided over the row layouts.


class DeviceBudget:
    """So many bytes for the rows of all layouts together.

    Layouts that have tables when the first of them needs memory get equal shares. One that comes later gets
    an equal share of what others have left: nothing, as a rule, so that its rows are in host memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._shares: dict[Hashable, int] = {}

    def share(self, layout: Hashable, in_use: Collection[Hashable]) -> int:
        """The bytes of a layout; in_use: those that have tables now. It stays the same from then on."""
        if layout not in self._shares:
            new = [layout for layout in {layout: None, **dict.fromkeys(in_use)} if layout not in self._shares]
            remaining = self.size - sum(size for layout, size in self._shares.items() if layout in in_use)
            self._shares |= dict.fromkeys(new, max(0, remaining) // len(new))
        return self._shares[layout]


# `TierStream`: the stream of exchanges, and how all other work on rows comes after them.


class TierStream:
    """Exchanges of rows are queued beside the current stream; `join` makes the current stream wait for them.

    On a CPU device, kernels run when they are queued. used: whether there is a host tier.
    """

    def __init__(self, device: torch.device, *, used: bool) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and used:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None  # of the last exchange, until it is known to be over

    def record(self) -> None:
        """An exchange was queued."""
        if self.stream is not None:
            self._done = self.stream.record_event()

    def join(self) -> None:
        """What is queued from now on, on the current stream, comes after the last exchange.

        A graph that is being recorded waits for nothing: whoever replays it joins.
        """
        done = self._done
        if done is None or torch.cuda.is_current_stream_capturing():
            return
        if done.query():  # type: ignore[no-untyped-call]
            self._done = None
            return
        current = torch.cuda.current_stream(self._device)
        if current != self.stream:
            current.wait_event(done)


# `Bound`: what the host knows of a number on the device without waiting for it.
#
# The host must have memory for all rows that a lookup may insert, before it knows how many earlier lookups
# have inserted. It therefore works with upper bounds: the last number it has read, and every position since.


class Bound:
    """An upper bound of a number that kernels increase, by at most one for each position of a lookup.

    It is what was read last, and all positions of lookups that this did not include.
    """

    def __init__(self, learned: int = 0) -> None:
        self.known = learned
        self.time = 0  # when that was read: lookups until then are included
        self._valid_from = 0

    def learn(self, value: int, time: int) -> None:
        """The number was `value` at a time."""
        if time > self.time and time >= self._valid_from:
            self.known, self.time = value, time

    def restart(self, value: int, time: int, valid_from: int) -> None:
        """The number is at most `value` at a time; what is read before `valid_from` says nothing."""
        self.known, self.time, self._valid_from = value, time, valid_from


_CHUNK_BYTES = 8 << 20
_LEAST_ROWS = 64
_MOST_CHUNKS = 1 << 16
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


class RowLayout(NamedTuple):
    """What a row consists of; the same as RowLayout of csrc/table/layout.h."""

    type: int  # of TYPES
    dim: int
    state: int  # floats of optimizer state

    @property
    def vector(self) -> int:
        """Bytes of the vector, with what pads it to whole floats."""
        return (self.dim * (4 if self.type == 0 else 2) + 3) // 4 * 4

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return (self.vector + 4 * self.state + 15) // 16 * 16

    @property
    def columns(self) -> int:
        """A power of two of at least dim."""
        return max(2, 1 << (self.dim - 1).bit_length())

    @property
    def states(self) -> int:
        """A power of two of at least the floats of state."""
        return max(2, 1 << (self.state - 1).bit_length()) if self.state else 2


class RowWatcher(Protocol):
    """Copies rows in the background, and must be called before they change (`captures.py`)."""

    def save(self, rows: torch.Tensor, most: int, work: torch.Tensor | None = None) -> None:
        """These distinct rows change or become free next, by work that is queued on the current stream.

        work: that of the lookup whose runs they are; otherwise there are `most` of them.
        """

    def pause(self) -> AbstractContextManager[None]:
        """Within it, no row is read: what gives rows other addresses is queued on the current stream."""


class RowSpace:
    """Rows that kernels find by number: those of chunk c have the numbers from c << shift on."""

    def __init__(self, layout: RowLayout, number: int, shift: int, chunks: torch.Tensor) -> None:
        self.layout = layout
        self.number = number  # among the store's arenas
        self.shift = shift
        self.chunks = chunks  # their addresses
        self._constants = {"SHIFT": shift, "STRIDE": layout.stride, "VECTOR": layout.vector}
        self._constants |= {"DIM": layout.dim, "COLUMNS": layout.columns, "TYPE": layout.type}
        self._constants |= {"STATE": layout.state, "STATES": layout.states}

    def constants(self, *names: str) -> dict[str, int]:
        """Where rows are and what they consist of, as constants of kernels."""
        return {name: self._constants[name] for name in names}


class RowArena(RowSpace):
    """Rows by number. Number 0 is a row of zeros; numbers of erased rows are used again."""

    def __init__(self, layout: RowLayout, device: torch.device, uploads: Uploads, number: int) -> None:
        super().__init__(layout, number, *self._table_of_chunks(layout, device))
        self.newest_version = 0  # of its tables
        self.captured_version = -1  # the newest one at the last capture of a table
        self.watchers: tuple[RowWatcher, ...] = ()  # captures that have not read all of their rows
        self._device = device
        self._uploads = uploads
        self._memory: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self.used = Bound(1)  # of row numbers
        self.full = False  # whether the device had no memory for rows of some batches ahead
        self.room = 0  # positions that lookups may still have before the host must look at the bound
        self._free_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.reserve(1)
        self._memory[0][: layout.stride].zero_()

    def _table_of_chunks(self, layout: RowLayout, device: torch.device) -> tuple[int, torch.Tensor]:
        """The shift of row numbers, and the addresses of chunks: none yet."""
        by_size = _CHUNK_BYTES // layout.stride
        shift: int = max(_LEAST_ROWS, 1 << max(0, by_size.bit_length() - 1)).bit_length() - 1
        return shift, torch.zeros(_MOST_CHUNKS, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        """Rows that there is memory for."""
        return len(self._addresses) << self.shift

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with its hash, count and steps."""
        return self.layout.stride + int(fields.ROW_EXTRA.value)

    def reserve(self, rows: int) -> None:
        """Have memory for row numbers below `rows`; raises torch.OutOfMemoryError if there is none."""
        lacking = -(-(rows - self.capacity) >> self.shift) if rows > self.capacity else 0
        if lacking <= 0:
            return
        if len(self._addresses) + lacking > _MOST_CHUNKS:
            raise torch.OutOfMemoryError(
                f"Rows of dim {self.layout.dim} take more than {_MOST_CHUNKS} chunks of memory."
            )
        chunk_bytes = self.row_bytes << self.shift
        more = min(max(lacking, len(self._addresses) // 16), _MOST_CHUNKS - len(self._addresses))
        try:
            memory = torch.empty(more * chunk_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            if more == lacking:
                raise
            more = lacking
            memory = torch.empty(more * chunk_bytes, dtype=torch.uint8, device=self._device)
        first = memory.data_ptr()
        self._memory.append(memory)
        before = len(self._addresses)
        self._addresses += [first + i * chunk_bytes for i in range(more)]
        self._uploads.send_to(self.chunks[before:], np.array(self._addresses[before:], np.int64))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within it, no watcher reads rows; work that gives them other addresses is queued there."""
        with ExitStack() as stack:
            for watcher in self.watchers:
                stack.enter_context(watcher.pause())
            yield

    @property
    def has_queue(self) -> bool:
        """Whether rows have been erased, so that there is a queue of free ones."""
        return self._free_rows.numel() > 1

    def reserve_queue(self, counters: torch.Tensor) -> None:
        """Have a queue of free rows that all rows fit into; `counters` are those of this arena."""
        size = 1 << (self.capacity - 1).bit_length()
        if size <= self._free_rows.numel():
            return
        before = self._free_rows
        self._free_rows = torch.zeros(size, dtype=torch.int32, device=self._device)
        if before.numel() > 1:  # the queue begins again at 0
            old = before.numel()
            head = counters[fields.FREE_HEAD.value].clone()
            self._free_rows[:old] = before[(torch.arange(old, device=self._device) + head) % old]
            counters[fields.FREE_TAIL.value] -= head
            counters[fields.FREE_HEAD.value].zero_()
        self.note_queue(counters)

    def note_queue(self, counters: torch.Tensor) -> None:
        """Tell the kernels where the queue of free rows is."""
        counters[fields.FREE_ROWS.value].fill_(
            self._free_rows.data_ptr()
        )  # an assignment of a number would wait
        counters[fields.FREE_MASK.value].fill_(self._free_rows.numel() - 1)


# `TieredArena`: rows that have locations in device memory or in that of the machine, an address for each.
#
# The table `chunks` has the address of each row, which kernels find by a shift of 0. A location is
#
#     row | hash | count, last step, birth, change | padding
#
# Row numbers are given out in order: the first ones have locations on the device, until their share of the
# memory is used, and all later ones have locations in host memory. Then rows exchange locations
# (`exchange.py`); their numbers stay.

_log = logging.getLogger("karvan.store")

_LEAST = 4  # locations on the device
_PLACE_BYTES = 8  # of a location on the device, beside it: its row and its mark
_DEVICE_CHUNK = 8 << 20
_HOST_CHUNKS = (1 << 21, 1 << 28)  # the least and the most bytes; torch rounds page-locked memory up to 2^n
_FIRST_NUMBERS = 1 << 10
_ON_HOST = exchange.ON_HOST.value


class TieredArena(RowArena):
    """Rows by number. The table of addresses is replaced when it grows."""

    def __init__(
        self, layout: RowLayout, device: torch.device, uploads: Uploads, number: int, tier: TierStream
    ) -> None:
        self.share: int | None = None  # the bytes of device memory that locations may take; None: of row 0
        self._tier = tier
        self._capacity = self.device_rows = 0
        self._host_bytes = 0
        self._limit = 1  # of device locations
        self.places = torch.empty(0, dtype=torch.int32, device=device)  # device locations of row numbers
        self.owners = torch.zeros(1, dtype=torch.int32, device=device)  # the row at each device location
        self.marks = torch.full_like(self.owners, -1)  # of each, the last exchange that must leave it
        self.hand = torch.zeros(1, dtype=torch.int64, device=device)  # where to look for locations next
        self.rounds = 0  # exchanges so far
        super().__init__(layout, device, uploads, number)
        if device.type == "cuda":
            # Nobody but kernels knows that they use host memory: before others get it, they must be done.
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    def _table_of_chunks(self, layout: RowLayout, device: torch.device) -> tuple[int, torch.Tensor]:
        return 0, torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def chunks(self) -> torch.Tensor:
        """The addresses of rows. Work that gets them and is queued now comes after the last exchange."""
        self._tier.join()
        return self._addresses_of_rows

    @chunks.setter
    def chunks(self, addresses: torch.Tensor) -> None:
        self._addresses_of_rows = addresses

    @property
    @override
    def capacity(self) -> int:
        return self._capacity

    @property
    def row_bytes(self) -> int:
        """Bytes of a location."""
        return (self.layout.stride + int(fields.ROW_EXTRA.value) + 15) // 16 * 16

    @property
    def has_host_rows(self) -> bool:
        """Whether there are locations in host memory."""
        return self._capacity > self.device_rows

    @override
    def reserve(self, rows: int) -> None:
        """Raises HostMemoryError if the machine has no memory."""
        if rows <= self._capacity:
            return
        self._tier.join()  # which writes to the tables that may be replaced
        if self.share is not None and self._limit == 1:
            self._limit = max(_LEAST, self.share // (self.row_bytes + _PLACE_BYTES))
            self.owners = torch.arange(self._limit, dtype=torch.int32, device=self._device)
            self.marks = torch.full_like(self.owners, -1)
        wanted = max(rows, self._capacity + self._capacity // 16)
        if not self.has_host_rows:
            self._reserve_device(wanted)
        while self._capacity < rows:
            self._reserve_host(wanted)

    def _reserve_device(self, rows: int) -> None:
        count = max(rows, self._capacity + _DEVICE_CHUNK // self.row_bytes)
        count = min(count, self._limit) - self._capacity
        if count <= 0:
            return
        try:
            memory = torch.empty(count * self.row_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            if self.share is None:  # there must be a row 0
                raise
            self._limit = self.device_rows
            _log.warning(
                "%s has no memory for more than %.2f GiB of rows of dim %d, of %.2f GiB that device_memory "
                "allows: further rows are in the memory of the machine.",
                self._device,
                self.device_rows * self.row_bytes / 2**30,
                self.layout.dim,
                self.share / 2**30,
            )
            return
        self._add(memory, count, on_host=False)

    def _reserve_host(self, rows: int) -> None:
        least, most = _HOST_CHUNKS
        wanted = max(self._host_bytes // 8, (rows - self._capacity) * self.row_bytes, self.row_bytes)
        size = min(max(least, 1 << (wanted - 1).bit_length()), max(most, self.row_bytes))
        memory = allocate(size, self._device)
        self._host_bytes += size
        self._add(memory, size // self.row_bytes, on_host=True)

    def _add(self, memory: torch.Tensor, count: int, *, on_host: bool) -> None:
        first, last = self._capacity, self._capacity + count
        self._grow_tables(last)
        self._memory.append(memory)
        numbers = torch.arange(count, dtype=torch.int64, device=self._device)
        self._addresses_of_rows[first:last] = numbers * self.row_bytes + memory.data_ptr()
        if on_host:
            self.places[first:last] = _ON_HOST
        else:
            self.places[first:last] = numbers + first
            self.device_rows = last
        self._capacity = last

    def _grow_tables(self, rows: int) -> None:
        before = self._addresses_of_rows.numel()
        if rows <= before:
            return
        size = max(_FIRST_NUMBERS, 1 << (rows - 1).bit_length())
        addresses = torch.zeros(size, dtype=torch.int64, device=self._device)
        places = torch.full((size,), _ON_HOST, dtype=torch.int32, device=self._device)
        addresses[:before] = self._addresses_of_rows
        places[:before] = self.places
        self._addresses_of_rows, self.places = addresses, places
