"""`RoundIdentity`: numbers as the nearest integer."""

from __future__ import annotations

from karvan.compat.elasticdl_preprocessing.layers.base import COLUMN, FeatureLayer
from karvan.features import Feature


class RoundIdentity(FeatureLayer):
    """Numbers rounded, half to even; what is not in [0, num_buckets) becomes default_value."""

    def __init__(self, num_buckets: int, default_value: int = 0, name: str | None = None) -> None:
        super().__init__(Feature(COLUMN).to_ids(num_buckets, default_value), name)
        self.num_buckets = num_buckets
