"""`ToRagged`: the columns of a tensor, or the parts of a string, as rows of different lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from karvan.batch_slicing import values_of
from karvan.compat.elasticdl_preprocessing.layers.base import COLUMN, is_text, layer_input, ragged_of
from karvan.compat.unsupported import UnsupportedError
from karvan.features import Feature, FeatureEngine
from karvan.ragged import Entry, NestedRagged, Ragged


class ToRagged(torch.nn.Module):
    """Rows without ignore_value: numbers as a `kv.Ragged`, strings as a `kv.NestedRagged`.

    ignore_value: -1 for integers and "" for strings, if it is None. Without one, strings are split at sep.
    """

    def __init__(
        self, sep: str = ",", ignore_value: float | str | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.ignore_value = ignore_value
        self._split = FeatureEngine([Feature(COLUMN).split(sep, skip_empty=True)])

    def forward(self, inputs: Any) -> Entry:
        """The rows."""
        entry, shape = layer_input(inputs)
        if isinstance(entry, NestedRagged) or (shape is not None and len(shape) > 2):
            raise UnsupportedError(
                "ToRagged of more than two dimensions",
                "expected a tensor (samples, n), or strings (samples,).",
            )
        if not (isinstance(entry, Ragged) and entry.values.dtype == torch.uint8):
            return rows_without(
                entry if shape is None else values_of(entry).reshape(shape), self.ignore_value
            )
        if self.ignore_value is not None:
            return words_without(inputs, self.ignore_value)
        if shape is not None and shape[1:] not in ((), (1,)):
            raise UnsupportedError(f"ToRagged of strings {shape}", "expected one string for each sample.")
        parts: Entry = self._split({COLUMN: entry})[COLUMN]
        return parts


def rows_without(entry: Entry, ignored: float | str | None) -> Entry:
    """Rows of numbers without one of them, -1 if it is None."""
    if ignored is None and values_of(entry).is_floating_point():
        raise ValueError("Rows of floats need ignore_value, the number to leave out, got None.")
    if isinstance(ignored, str):
        raise TypeError(f"Rows of numbers expect a number as ignore_value, got {ignored!r}.")
    pad = -1 if ignored is None else ignored
    rows: Entry = FeatureEngine([Feature(COLUMN).to_ragged(pad)])({COLUMN: entry})[COLUMN]
    return rows


def words_without(inputs: Any, ignored: float | str) -> Entry:
    """Rows of strings, in an array or lists, without one of them."""
    array = np.asarray(inputs)
    if not is_text(array) or array.ndim > 2 or not isinstance(ignored, str):
        raise UnsupportedError(
            f"ignore_value={ignored!r} of {type(inputs).__name__}",
            "expected strings in an array or in lists.",
        )
    rows = array.reshape(len(array), -1).tolist()
    return ragged_of([[word for word in row if word not in (ignored, ignored.encode())] for row in rows])
