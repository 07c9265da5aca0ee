"""`Normalizer`: numbers less a subtractor, divided by a divisor."""

from __future__ import annotations

import torch

from karvan.batch_slicing import values_of
from karvan.compat.elasticdl_preprocessing.layers.base import COLUMN, FeatureLayer, LayerInput
from karvan.compat.unsupported import UnsupportedError
from karvan.features import Feature
from karvan.features.ops.layout import with_values


class Normalizer(FeatureLayer):
    """(x - subtractor) / divisor, as float32."""

    def __init__(self, subtractor: float, divisor: float, name: str | None = None) -> None:
        if divisor == 0:
            raise ValueError("Normalizer expects a divisor other than 0, got 0.")
        if divisor < 0:
            raise UnsupportedError(f"Normalizer(divisor={divisor})", "expected one above 0.")
        super().__init__(Feature(COLUMN).normalise(float(subtractor), float(divisor)), name)

    def _prepared(self, given: LayerInput) -> LayerInput:
        return given._replace(entry=with_values(given.entry, values_of(given.entry).to(torch.float32)))
