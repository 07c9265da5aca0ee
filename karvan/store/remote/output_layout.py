"""The layout of outputs that an embedding worker computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class OutputLayout(NamedTuple):
    """The layout of a feature's output.

    ids: of all samples; length: cells of a sample; offsets: where the ids of samples start, None where each
    sample has one id.
    """

    samples: int
    ids: int
    length: int
    offsets: Tensor | None

    def lengths(self) -> Tensor:
        """The number of ids of each sample."""
        if self.offsets is None:
            return torch.ones(self.samples, dtype=torch.int64)
        return self.offsets.diff()

    def mask(self) -> Tensor:
        """(samples, length), True where a padded output has the vector of an id."""
        lengths = self.lengths().unsqueeze(1)
        return torch.arange(self.length, device=lengths.device) < lengths
