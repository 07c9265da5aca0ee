"""`TieredArena`: rows that have locations in device memory or in that of the machine, an address for each.

The table `chunks` has the address of each row, which kernels find by a shift of 0. A location is

    row | hash | count, last step, birth, change | padding

Row numbers are given out in order: the first ones have locations on the device, until their share of the
memory is used, and all later ones have locations in host memory. Then rows exchange locations
(`exchange.py`); their numbers stay.
"""

from __future__ import annotations

import logging
import weakref

import torch
from typing_extensions import override

from karvan.store.cuda.kernels import row_memory
from karvan.store.cuda.rows.arena import RowArena, RowLayout
from karvan.store.cuda.tier import host_memory, kernels
from karvan.store.cuda.tier.host_memory import TierStream
from karvan.store.cuda.transfers import Uploads

_log = logging.getLogger("karvan.store")

_LEAST = 4  # locations on the device
_PLACE_BYTES = 8  # of a location on the device, beside it: its row and its mark
_DEVICE_CHUNK = 8 << 20
_HOST_CHUNKS = (1 << 21, 1 << 28)  # the least and the most bytes; torch rounds page-locked memory up to 2^n
_FIRST_NUMBERS = 1 << 10
_ON_HOST = kernels.ON_HOST.value


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
        return (self.layout.stride + int(row_memory.ROW_EXTRA.value) + 15) // 16 * 16

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
        memory = host_memory.allocate(size, self._device)
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
