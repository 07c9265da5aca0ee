"""`FeatureLayer`: a layer that runs steps of a `kv.Feature` on what programs of ElasticDL pass to layers.

| Input | Stands for |
|---|---|
| a tensor, an array, lists of one length | a dense tensor; the result has its shape |
| `kv.Ragged` | a ragged or sparse tensor of numbers |
| `kv.NestedRagged` of bytes | a ragged or sparse tensor of strings |
| lists of several lengths | the same |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from karvan.batch_slicing import values_of
from karvan.compat.unsupported import UnsupportedError
from karvan.features import Feature, FeatureEngine
from karvan.ragged import Entry, NestedRagged, Ragged

COLUMN = "x"


class LayerInput(NamedTuple):
    """An entry of a batch; shape: of the dense tensor whose flat values it has, None if it has rows."""

    entry: Entry
    shape: tuple[int, ...] | None


class FeatureLayer(nn.Module):
    """Runs a feature's steps; the result of a dense tensor is one of the same shape."""

    def __init__(self, feature: Feature, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._engine = FeatureEngine([feature])

    def forward(self, inputs: Any) -> Any:
        """The result; see `LayerInput`."""
        given = self._prepared(layer_input(inputs))
        made = self._engine({COLUMN: given.entry})[COLUMN]
        if given.shape is None:
            return made
        values = values_of(made)
        if values.numel() != torch.Size(given.shape).numel():
            raise ValueError(
                f"{type(self).__name__} expects a number everywhere, got NaN or an empty text: replace them "
                "before, or pass a kv.Ragged without them."
            )
        return values.reshape(given.shape)

    def _prepared(self, given: LayerInput) -> LayerInput:
        return given


def layer_input(inputs: Any) -> LayerInput:
    """What a program passes to a layer, as an entry of a batch."""
    if isinstance(inputs, Ragged | NestedRagged):
        return LayerInput(inputs, None)
    if isinstance(inputs, Tensor):
        if inputs.layout != torch.strided:
            raise UnsupportedError(f"A tensor of layout {inputs.layout}", "pass a kv.Ragged of its rows.")
        return LayerInput(inputs.reshape(-1), tuple(inputs.shape))
    try:
        array = np.asarray(inputs)
    except ValueError:  # lists of several lengths
        return LayerInput(ragged_of([list(row) for row in inputs]), None)
    if is_text(array):
        return LayerInput(text_of(array.reshape(-1).tolist()), array.shape)
    return LayerInput(torch.from_numpy(np.ascontiguousarray(array)).reshape(-1), array.shape)


def is_text(array: Any) -> bool:
    """Whether an array has strings."""
    return array.dtype.kind in "US" or (
        array.dtype.kind == "O" and all(isinstance(each, str | bytes) for each in array.reshape(-1))
    )


def text_of(words: Sequence[str | bytes]) -> Ragged:
    """Strings as rows of bytes."""
    texts = [word.encode() if isinstance(word, str) else word for word in words]
    return Ragged.from_lists(texts, dtype=torch.uint8)


def ragged_of(rows: Sequence[Sequence[Any]]) -> Entry:
    """Lists of numbers or strings as rows."""
    flat = [value for row in rows for value in row]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    if flat and isinstance(flat[0], str | bytes):
        words = text_of(flat)
        assert words.offsets is not None
        return NestedRagged(words.values, words.offsets, offsets)
    return Ragged(torch.tensor(flat) if flat else torch.empty(0, dtype=torch.int64), offsets)
