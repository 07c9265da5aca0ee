"""`SavedRows`: copies of rows that a capture has not read before they changed, in page-locked memory.

Kernels write there directly, and count the places on the device. The host knows an upper bound of that number
without waiting, as it does of rows (`rows/bounds.py`), and has memory for it.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda.rows.arena import RowLayout
from karvan.store.cuda.rows.row_staging import Words
from karvan.store.cuda.transfers import Counters, Uploads

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
            made = [
                torch.empty(self._chunk_bytes // 4, dtype=torch.int32, pin_memory=self._pinned)
                for _ in range(-(-lacking // self.size))
            ]
            before = self._released + len(self._chunks)
            addresses = np.array([chunk.data_ptr() for chunk in made], np.int64)
            self._uploads.send_to(self.places[before:], addresses)
            self._chunks += made

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
        known = int(self.counter.poll()[0])
        while self._in_flight and self._in_flight[0][0] <= self.counter.known_time:
            self._in_flight.popleft()
        bound = known + sum(count for _, count in self._in_flight)
        return min(bound + rows, self._most) - self._capacity  # a row is saved once

    def count(self) -> int:
        """How many rows were saved so far, on the thread that saves them; waits for the newest save."""
        self.counter.catch_up()
        return int(self.counter.poll()[0])

    def chunks(self, first: int, end: int) -> list[tuple[Words, NDArray[np.int32]]]:
        """Views of the places [first, end), which kernels have written: rows, and their indices."""
        size, words = self.size, self._layout.stride // 4
        found = []
        while first < end:
            number, start = divmod(first, size)
            stop = min(size, start + end - first)
            chunk = self._chunks[number - self._released].numpy()
            rows, indices = chunk[: size * words].reshape(size, words), chunk[size * words :]
            found.append((rows[start:stop], indices[start:stop]))
            first += stop - start
        return found

    def release(self, first: int) -> None:
        """Release the chunks of places below `first`."""
        while (self._released + 1) * self.size <= first:
            self._chunks.popleft()
            self._released += 1
