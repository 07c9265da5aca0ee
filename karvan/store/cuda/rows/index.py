"""`KeyIndex`: from the hashes of one table's keys to row numbers, in device memory, growing step by step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from karvan.store.cuda.kernels import fields

_LEAST = 256  # slots
_LOAD = 0.6  # more used slots than this share of all, and the index grows
_MOVED = 1 << 19  # slots that one step moves at least
WIDTH = 4  # slots that a search reads at a time


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
        return torch.zeros(2 * (slots + WIDTH), dtype=torch.int64, device=self._device)

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
