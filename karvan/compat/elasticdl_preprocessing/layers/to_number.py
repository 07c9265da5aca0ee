"""`ToNumber`: strings as numbers, numbers as those of another type."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from karvan.batch_slicing import values_of
from karvan.compat.elasticdl_preprocessing.layers.base import COLUMN, layer_input
from karvan.compat.unsupported import UnsupportedError
from karvan.features import Feature, FeatureEngine
from karvan.features.ops.layout import is_text, with_values
from karvan.ragged import Entry, NestedRagged, Ragged


class ToNumber(torch.nn.Module):
    """The numbers that strings spell; an empty string is default_value.

    out_type: a dtype of torch or numpy.
    """

    def __init__(self, out_type: Any, default_value: float, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.out_type = out_type if isinstance(out_type, torch.dtype) else _dtype(out_type)
        if self.out_type.is_floating_point:
            steps = Feature(COLUMN).to_numbers(float(default_value))
        else:
            steps = Feature(COLUMN).to_ids().fill_missing(int(default_value))
        self._engine = FeatureEngine([steps])

    def forward(self, inputs: Any) -> Entry:
        """Numbers of the same shape, or in the same rows."""
        entry, shape = layer_input(inputs)
        if not is_text(entry):
            made = with_values(entry, values_of(entry).to(self.out_type))
            return made if shape is None else values_of(made).reshape(shape)
        if self.out_type == torch.float64:
            raise UnsupportedError("ToNumber(float64) of strings", "expected torch.float32.")
        assert not isinstance(entry, Tensor)
        words = entry.lists() if isinstance(entry, NestedRagged) else entry
        numbers = self._cast(values_of(self._engine({COLUMN: words})[COLUMN]))
        if isinstance(entry, NestedRagged):
            return Ragged(numbers, entry.outer)
        return numbers if shape is None else numbers.reshape(shape)

    def _cast(self, numbers: Tensor) -> Tensor:
        made = numbers.to(self.out_type)
        if not self.out_type.is_floating_point and not torch.equal(made.to(numbers.dtype), numbers):
            raise ValueError(f"ToNumber expects numbers that fit into {self.out_type}, got larger ones.")
        return made


def _dtype(given: Any) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, np.dtype(given))).dtype
    except TypeError as error:
        raise ValueError(f"ToNumber expects out_type as a dtype of numbers, got {given!r}.") from error
