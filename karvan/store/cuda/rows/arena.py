"""`RowArena`: the memory of rows of one layout, for all tables that have it, in chunks that never move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch

from karvan.store.cuda.kernels import fields, row_memory
from karvan.store.cuda.transfers import Uploads

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
        return self.layout.stride + int(row_memory.ROW_EXTRA.value)

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
