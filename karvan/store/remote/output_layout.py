"""The layout of outputs that an embedding worker computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowIndex(NamedTuple):
    """Which rows of an output the samples of a batch have, for the combiner "index".

    vectors: the rows of the output that the index refers to; what follows them is not used. Row 0 is zeros.
    rows: (samples, length), int64, 0 where a sample has no id. weights: likewise, float32, of ids.
    """

    vectors: int
    rows: Tensor
    weights: Tensor | None


class OutputLayout(NamedTuple):
    """The layout of a feature's output.

    ids: of all samples; length: cells of a sample; offsets: where the ids of samples start, None where each
    sample has one id. row_index: of the combiner "index", whose output has lists of ids for samples.
    """

    samples: int
    ids: int
    length: int
    offsets: Tensor | None
    row_index: RowIndex | None = None

    def lengths(self) -> Tensor:
        """The number of ids of each sample."""
        if self.offsets is None:
            return torch.ones(self.samples, dtype=torch.int64)
        return self.offsets.diff()

    def mask(self) -> Tensor:
        """(samples, length), True where a padded output has the vector of an id."""
        lengths = self.lengths().unsqueeze(1)
        return torch.arange(self.length, device=lengths.device) < lengths
