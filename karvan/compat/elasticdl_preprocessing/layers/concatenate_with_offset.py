"""`ConcatenateWithOffset`: ids of several features as one, each shifted by an offset of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from karvan.batch_slicing import values_of
from karvan.compat.unsupported import UnsupportedError
from karvan.features import Feature, FeatureEngine
from karvan.features.ops.layout import with_values
from karvan.ragged import Entry


class ConcatenateWithOffset(torch.nn.Module):
    """The columns of tensors (samples, n), or the rows of `kv.Ragged`s, one after the other."""

    def __init__(self, offsets: Sequence[int], axis: int = -1, name: str | None = None) -> None:
        super().__init__()
        if axis not in (-1, 1):
            raise UnsupportedError(f"ConcatenateWithOffset(axis={axis})", "expected -1 or 1, the columns.")
        self.name = name
        self.offsets = list(offsets)
        columns = [str(number) for number in range(len(self.offsets))]
        steps = Feature("ids").concat(*columns, offsets=self.offsets) if len(columns) > 1 else None
        self._engine = None if steps is None else FeatureEngine([steps])

    def forward(self, inputs: Sequence[Entry]) -> Entry:
        """Ids as int64: a tensor if all inputs are tensors, else a `kv.Ragged`."""
        if len(inputs) != len(self.offsets):
            raise ValueError(
                f"ConcatenateWithOffset expects an input for each of {len(self.offsets)} offsets, got "
                f"{len(inputs)}."
            )
        if self._engine is None:
            raise UnsupportedError("ConcatenateWithOffset of one input", "expected two of them or more.")
        columns = {str(number): _ids(entry) for number, entry in enumerate(inputs)}
        joined: Entry = self._engine(columns)["ids"]
        return joined


def _ids(entry: Entry) -> Entry:
    values = values_of(entry)
    return entry if values.is_floating_point() else with_values(entry, values.to(torch.int64))
