"""`LogRound`: numbers as the nearest integer to their logarithm."""

from __future__ import annotations

import math

import torch

from karvan.batch_slicing import values_of
from karvan.compat.elasticdl_preprocessing.layers.base import COLUMN, FeatureLayer, LayerInput
from karvan.features import Feature
from karvan.features.ops.layout import with_values


class LogRound(FeatureLayer):
    """round(log(x)) in double precision; what is not in [0, num_bins) becomes default_value.

    base: of the logarithm, e without one.
    """

    def __init__(
        self, num_bins: int, default_value: int = 0, base: float | None = None, name: str | None = None
    ) -> None:
        steps = Feature(COLUMN).log(math.e if base is None else base).to_ids(num_bins, default_value)
        super().__init__(steps, name)
        self.num_bins = num_bins

    def _prepared(self, given: LayerInput) -> LayerInput:
        return given._replace(entry=with_values(given.entry, values_of(given.entry).to(torch.float64)))
