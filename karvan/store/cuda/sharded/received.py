"""`ReceivedVectors`: vectors in one buffer, addressed like the rows of a table."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from karvan.store.cuda.rows.arena import RowLayout, RowSpace
from karvan.store.cuda.transfers import Uploads

_UNIT_BYTES = 16
_SHIFT = 30  # a buffer has at most twice so many units: row numbers are 32-bit


class VectorLayout(RowLayout):
    """Vectors of float32 that begin at any unit."""

    __slots__ = ()

    @property
    def stride(self) -> int:
        """Bytes from one row number to the next."""
        return _UNIT_BYTES


class ReceivedVectors(RowSpace):
    """Vectors of one dim, by the number of the unit that they begin at."""

    def __init__(self, dim: int, device: torch.device) -> None:
        super().__init__(VectorLayout(0, dim, 0), 0, _SHIFT, torch.zeros(2, dtype=torch.int64, device=device))

    def place(self, buffer: Tensor, uploads: Uploads, before: int = 0) -> None:
        """The buffer that has them; before: how many numbers there are before its first unit."""
        if buffer.numel() * 4 + before * _UNIT_BYTES > 2 * _UNIT_BYTES << _SHIFT:
            raise ValueError(
                "A batch of a rank expects vectors of distinct keys of at most "
                f"{(2 * _UNIT_BYTES << _SHIFT) >> 30} GiB, got {buffer.numel() * 4 / 2**30:.1f}: use smaller "
                "batches."
            )
        first = buffer.data_ptr() - before * _UNIT_BYTES
        self.chunks = uploads.send(np.array([first, first + (_UNIT_BYTES << _SHIFT)], np.int64))
