"""Rows of a table that are saved while training continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.store.cuda import contents
from karvan.store.cuda.arena import RowArena, RowLayout, RowWatcher
from karvan.store.cuda.contents import RowFields, RowStaging, Words, unpack
from karvan.store.cuda.kernels.maintenance import gather_rows, save_rows
from karvan.store.cuda.launch import Counters, Uploads
from karvan.store.cuda.table_memory import DeviceTable, TableMemory
from karvan.store.types import Capture, Keys, Rows

# `SavedRows`: copies of rows that a capture has not read before they changed, in page-locked memory.
#
# Kernels write there directly, and count the places on the device. The host knows an upper bound of that
# number without waiting, as it does of rows (`arena.py`), and has memory for it.


_CHUNK_BYTES = 8 << 20
_LEAST_ROWS = 16
_MOST_BYTES = 4 << 30  # in all chunks, from which on the thread that saves rows takes earlier ones out first


class SavedRows:
    """Memory for at most `most` rows, in chunks that are allocated as they are needed."""

    def __init__(self, device: torch.device, uploads: Uploads, layout: RowLayout, most: int) -> None:
        self.size = max(_LEAST_ROWS, _CHUNK_BYTES // (layout.stride + 4))  # places of a chunk
        self.counter = Counters(device, 1)  # rows that were saved
        self.places = torch.zeros(most // self.size + 1, dtype=torch.int64, device=device)
        self._most = most
        self._uploads = uploads
        self._layout = layout
        self._pinned = device.type == "cuda"
        self._chunks: deque[Tensor] = deque()  # from number `_released` on
        self._released = 0
        self._in_flight: deque[tuple[int, int]] = deque()  # times, and rows that may have been saved then

    @property
    def bytes(self) -> int:
        """Page-locked memory of the rows that were not taken out."""
        return len(self._chunks) * self._chunk_bytes

    def is_crowded(self, rows: int) -> bool:
        """Whether so many more rows need more memory than there should be."""
        lacking = self._lacking(rows)
        more = -(-lacking // self.size) * self._chunk_bytes
        return lacking > 0 and len(self._chunks) > 1 and self.bytes + more > _MOST_BYTES

    def reserve(self, rows: int) -> None:
        """Have memory for so many more rows, on the thread that saves them."""
        lacking = self._lacking(rows)
        if lacking > 0:
            buffers = [
                torch.empty(self._chunk_bytes // 4, dtype=torch.int32, pin_memory=self._pinned)
                for _ in range(-(-lacking // self.size))
            ]
            before = self._released + len(self._chunks)
            addresses = np.array([chunk.data_ptr() for chunk in buffers], np.int64)
            self._uploads.send_to(self.places[before:], addresses)
            self._chunks += buffers

    def note_save(self, rows: int) -> None:
        """A kernel that saves at most so many rows was queued."""
        self._in_flight.append((self.counter.request(), rows))

    @property
    def _capacity(self) -> int:
        return (self._released + len(self._chunks)) * self.size

    @property
    def _chunk_bytes(self) -> int:
        return (self._layout.stride + 4) * self.size

    def _lacking(self, rows: int) -> int:
        """For how many of so many rows there is no memory: by what is known, or else by what can be known."""
        lacking = self._lacking_now(rows)
        if lacking > 0 and self._in_flight:  # perhaps only because the host is ahead of the device
            self.counter.catch_up()
            lacking = self._lacking_now(rows)
        return lacking

    def _lacking_now(self, rows: int) -> int:
        captured = int(self.counter.poll()[0])
        while self._in_flight and self._in_flight[0][0] <= self.counter.known_time:
            self._in_flight.popleft()
        bound = captured + sum(count for _, count in self._in_flight)
        return min(bound + rows, self._most) - self._capacity  # a row is saved once

    def count(self) -> int:
        """How many rows were saved so far, on the thread that saves them; waits for the newest save."""
        self.counter.catch_up()
        return int(self.counter.poll()[0])

    def chunks(self, first: int, end: int) -> list[tuple[Words, NDArray[np.int32]]]:
        """Views of the places [first, end), which kernels have written: rows, and their indices."""
        size, words = self.size, self._layout.stride // 4
        captures = []
        while first < end:
            number, start = divmod(first, size)
            stop = min(size, start + end - first)
            chunk = self._chunks[number - self._released].numpy()
            rows, indices = chunk[: size * words].reshape(size, words), chunk[size * words :]
            captures.append((rows[start:stop], indices[start:stop]))
            first += stop - start
        return captures

    def release(self, first: int) -> None:
        """Release the chunks of places below `first`."""
        while (self._released + 1) * self.size <= first:
            self._chunks.popleft()
            self._released += 1


# `PendingRows`: the rows of one arena that a capture has listed, until each was copied to the host.
#
# Two threads work on them. The one that reads the capture gathers rows that are still pending, some at a
# time, on another stream. The one that trains saves pending rows before it changes or frees them. Both cross
# out what they have copied. A gather and a save never overlap: each is queued with the lock held, and waits
# on the device for the newest of the other kind. As a save comes before each change on the same stream, a
# gather never reads a row that is changing; training waits for one gather at most. Its host thread waits for
# none, but perhaps for the number of rows that it has saved so far.
#
# Saved rows are in page-locked memory at first. Whoever reads the capture sorts them by the range of the list
# that they belong to, into other memory; so does the thread that trains when there are too many.
#
# On "cpu" kernels run at once, with the lock held.


_watching = threading.RLock()  # held while the watchers of an arena are replaced


class PendingRows(RowWatcher):
    """Rows of an arena, listed when this is created.

    cuts: where the ranges of the list that are read together begin, and the end.
    """

    def __init__(self, memory: TableMemory, arena: RowArena, rows: Tensor, cuts: Sequence[int]) -> None:
        self._memory = memory
        self._arena = arena
        self.layout = arena.layout
        self._chunks = arena.chunks
        self._rows = rows
        self._left = rows.numel()  # that were not gathered
        self._cuts = np.array(cuts, np.int64)
        self._lock = threading.Lock()
        self._pending = torch.zeros(arena.capacity, dtype=torch.int32, device=memory.device)
        numbers = torch.arange(1, rows.numel() + 1, dtype=torch.int32, device=memory.device)
        self._pending[rows.long()] = numbers
        self._saved = SavedRows(memory.device, memory.uploads, arena.layout, rows.numel())
        self._taking = threading.Lock()
        self._taken = 0  # saved rows that are in `_of_range`
        self._of_range: dict[int, list[tuple[Words, NDArray[np.int32]]]] = {}
        self._staging: RowStaging | None = None
        self._stream = memory.streams.gathers
        if self._stream is not None:
            self._listed = torch.cuda.current_stream(memory.device).record_event()
            self._stream.wait_event(self._listed)
            self._changed = self._listed  # the newest save
            self._gathered = self._stream.record_event()  # the newest gather
        self._report = torch.zeros(1, dtype=torch.int64, pin_memory=self._stream is not None)
        if self._left:
            with _watching:
                arena.watchers = (*arena.watchers, self)

    @property
    def saved_bytes(self) -> int:
        """Page-locked memory of rows that changed before they were read."""
        return self._saved.bytes

    @override
    def save(self, rows: Tensor, most: int, work: Tensor | None = None) -> None:
        with self._lock:
            crowded = self._saved.is_crowded(min(most, self._left))
        if crowded:
            self._take_saved(self._saved.count())
        with self.pause():
            most = min(most, self._left)
            if not most:
                return
            arena, memory = self._arena, self._memory
            self._saved.reserve(most)
            listed = (rows, memory.empty, rows.numel()) if work is None else (rows, work, 0)
            saved = (self._saved.counter.values, self._saved.places, arena.chunks)
            save_rows[(memory.programs,)](
                *(*listed, self._pending, self._pending.numel(), *saved),
                **{"PLACES": self._saved.size, "RUNS": work is not None},
                **contents.copy_constants(arena),
            )
            self._saved.note_save(most)

    @contextmanager
    @override
    def pause(self) -> Iterator[None]:
        with self._lock:
            if self._stream is not None:
                current = torch.cuda.current_stream(self._memory.device)
                current.wait_event(self._changed)  # it may have been queued on another stream
                current.wait_event(self._gathered)
            try:
                yield
            finally:
                if self._stream is not None:
                    self._chunks.record_stream(self._stream)  # gathers may read it, if it was replaced
                    self._changed = current.record_event()
                self._chunks = self._arena.chunks

    def read(self, number: int, vectors: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """Write the rows of a range, as they were, into arrays; each range is read once."""
        layout, (begin, end) = self.layout, self._cuts[number : number + 2].tolist()
        if begin == end:
            return
        if self._staging is None:
            with self._beside():
                self._staging = RowStaging(
                    self._memory.device,
                    layout,
                    int(np.diff(self._cuts).max()),
                    self._memory.streams.copies,
                )
                self._launch(self._pending, 0, 0)  # compiled without the lock, for which training would wait

        def fill(buffer: Tensor, first: int, count: int) -> torch.cuda.Event | None:
            return self._gather(buffer, begin + first, count)

        for first, words in self._staging.read(end - begin, fill):
            some = slice(first, first + len(words))
            unpack(words, layout, vectors[some], state[some])
        self._take_saved(int(self._report[0]))
        with self._taking:
            saved = self._of_range.pop(number, [])
        for words, indices in saved:
            some_vectors = np.empty((len(words), layout.dim), np.float32)
            some_state = np.empty((len(words), layout.state), np.float32)
            unpack(words, layout, some_vectors, some_state)
            vectors[indices - begin], state[indices - begin] = some_vectors, some_state

    def _gather(self, buffer: Tensor, first: int, count: int) -> torch.cuda.Event | None:
        """Copy the rows of a piece of the list that are still pending; the others are saved."""
        with self._lock, self._beside():
            if self._stream is not None:
                self._stream.wait_event(self._changed)
            self._launch(buffer, first, count)
            if self._stream is not None:
                self._gathered = self._stream.record_event()
            self._left -= count
            if not self._left:
                self._end_watch()
            return None if self._stream is None else self._gathered

    def _launch(self, buffer: Tensor, first: int, count: int) -> None:
        constants = contents.copy_constants(self._arena)
        addresses = (self._report.data_ptr(), self._chunks.data_ptr(), buffer.data_ptr())
        gather_rows[(max(1, -(-count // constants["GROUP"])),)](
            self._rows, first, count, self._pending, self._saved.counter.values, *addresses, **constants
        )

    def _beside(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _take_saved(self, end: int) -> None:
        """Sort the first `end` rows that were saved by their ranges; their page-locked memory is released."""
        with self._taking:
            if end <= self._taken:
                return
            with self._lock:
                chunks = self._saved.chunks(self._taken, end)
            for words, indices in chunks:
                ranges = np.searchsorted(self._cuts, indices, side="right") - 1
                order = np.argsort(ranges, kind="stable")
                numbers, starts = np.unique(ranges[order], return_index=True)
                for number, some in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
                    self._of_range.setdefault(number, []).append((words[some], indices[some]))
            self._taken = end
            with self._lock:
                self._saved.release(end)

    def to_host(self, numbers: Tensor) -> Tensor:
        """A tensor that was there at the creation, on the host; waits for nothing else on the device."""
        with self._beside():
            return numbers.cpu()

    def close(self) -> None:
        """Wait for what is queued; rows that were not read are not pending any more."""
        with self._lock:
            self._left = 0
            self._end_watch()
        if self._stream is not None:
            self._stream.synchronize()
            self._changed.synchronize()

    def _end_watch(self) -> None:
        with _watching:
            self._arena.watchers = tuple(watcher for watcher in self._arena.watchers if watcher is not self)


# `DeviceCapture`: tables of a `CudaStore` as they were at one moment, read while training continues.


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
