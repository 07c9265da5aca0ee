"""Rows on their way from a device to the host, as they are in memory, through two page-locked buffers.

While the host takes rows out of one buffer, the device fills the other one. Vectors become float32 on the
host: those of 16 bits cross as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda.rows.arena import RowLayout

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
