"""`Discretization`: numbers as the number of their interval."""

from __future__ import annotations

from collections.abc import Sequence

from karvan.compat.elasticdl_preprocessing.layers.base import COLUMN, FeatureLayer
from karvan.features import Feature


class Discretization(FeatureLayer):
    """How many of the bins' boundaries are not above a number: bins [0, 1] are x < 0, 0 <= x < 1, 1 <= x."""

    def __init__(self, bins: Sequence[float], name: str | None = None) -> None:
        super().__init__(Feature(COLUMN).bucketize(bins), name)
        self.bins = list(bins)

    def num_bins(self) -> int:
        """How many intervals there are."""
        return len(self.bins) + 1
