"""`PendingRows`: the rows of one arena that a capture has listed, until each was copied to the host.

Two threads work on them. The one that reads the capture gathers rows that are still pending, some at a time,
on another stream. The one that trains saves pending rows before it changes or frees them. Both cross
out what they have copied. A gather and a save never overlap: each is queued with the lock held, and waits on
the device for the newest of the other kind. As a save comes before each change on the same stream, a gather
never reads a row that is changing; training waits for one gather at most. Its host thread waits for none, but
perhaps for the number of rows that it has saved so far (`saved_rows.py`).

Saved rows are in page-locked memory at first. Whoever reads the capture sorts them by the range of the list
that they belong to, into other memory; so does the thread that trains when there are too many.

On "cpu" kernels run at once, with the lock held.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.store.cuda.captures.kernels import gather_rows, save_rows
from karvan.store.cuda.captures.saved_rows import SavedRows
from karvan.store.cuda.rows import contents
from karvan.store.cuda.rows.arena import RowArena, RowWatcher
from karvan.store.cuda.rows.row_staging import RowStaging, Words, unpack
from karvan.store.cuda.rows.table_memory import TableMemory

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
            save_rows[(memory.programs,)](
                rows,
                memory.empty if work is None else work,
                rows.numel() if work is None else 0,
                self._pending,
                self._pending.numel(),
                self._saved.counter.values,
                self._saved.places,
                arena.chunks,
                memory.programs,
                SHIFT=arena.shift,
                PLACES=self._saved.size,
                RUNS=work is not None,
                **contents.copy_constants(self.layout),
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
        constants = contents.copy_constants(self.layout)
        gather_rows[(max(1, -(-count // constants["GROUP"])),)](
            self._rows,
            first,
            count,
            self._pending,
            self._saved.counter.values,
            self._report.data_ptr(),
            self._chunks.data_ptr(),
            buffer.data_ptr(),
            SHIFT=self._arena.shift,
            **constants,
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
            self._arena.watchers = tuple(each for each in self._arena.watchers if each is not self)
