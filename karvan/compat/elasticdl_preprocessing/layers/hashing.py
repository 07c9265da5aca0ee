"""`Hashing`: strings or integers as ids below a number of bins."""

from __future__ import annotations

from karvan.compat.elasticdl_preprocessing.layers.base import COLUMN, FeatureLayer
from karvan.features import Feature


class Hashing(FeatureLayer):
    """The hash of a string modulo num_bins; an integer is hashed as its decimal text."""

    def __init__(self, num_bins: int, name: str | None = None) -> None:
        if num_bins is None or num_bins <= 0:
            raise ValueError(f"Hashing expects num_bins of at least 1, got {num_bins}.")
        super().__init__(Feature(COLUMN).to_text().hash("farm", num_bins), name)
        self.num_bins = num_bins
