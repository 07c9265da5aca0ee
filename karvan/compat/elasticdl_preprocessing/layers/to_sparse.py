"""`ToSparse`: the values of a dense tensor that are no padding, as rows of different lengths."""

from __future__ import annotations

from typing import Any

import torch

from karvan.batch_slicing import values_of
from karvan.compat.elasticdl_preprocessing.layers.base import layer_input
from karvan.compat.elasticdl_preprocessing.layers.to_ragged import rows_without, words_without
from karvan.ragged import Entry, Ragged


class ToSparse(torch.nn.Module):
    """A `kv.Ragged`, or a `kv.NestedRagged` of strings, of each row's values other than ignore_value.

    ignore_value: -1 for integers and "" for strings, if it is None. Rows stay as they are. A sparse tensor's
    columns, which embeddings do not need, are not there.
    """

    def __init__(self, ignore_value: float | str | None = None, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.ignore_value = ignore_value

    def forward(self, inputs: Any) -> Entry:
        """The rows."""
        entry, shape = layer_input(inputs)
        if shape is None:
            return entry
        if isinstance(entry, Ragged):
            return words_without(inputs, "" if self.ignore_value is None else self.ignore_value)
        return rows_without(values_of(entry).reshape(shape), self.ignore_value)
