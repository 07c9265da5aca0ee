"""The layout of outputs that an embedding worker computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class OutputLayout(NamedTuple):
    """A feature's output: its rows, the ids in all of them, cells of a row, and where rows begin.

    offsets: None where each row has one id.
    """

    rows: int
    ids: int
    length: int
    offsets: Tensor | None

    def lengths(self) -> Tensor:
        """Ids of each row."""
        if self.offsets is None:
            return torch.ones(self.rows, dtype=torch.int64)
        return self.offsets.diff()

    def mask(self) -> Tensor:
        """(rows, length), True where a padded output has the vector of an id."""
        return torch.arange(self.length) < self.lengths().unsqueeze(1)
