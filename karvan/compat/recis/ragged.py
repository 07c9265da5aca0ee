"""`RaggedTensor`: RecIS's form of `kv.Ragged` and `kv.NestedRagged`, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from karvan.compat.unsupported import UnsupportedError, unsupported_method
from karvan.features import Feature, FeatureEngine
from karvan.ragged import Entry, NestedRagged, Ragged

__all__ = ["RaggedTensor"]


class RaggedTensor:
    """Values and the offsets of their rows, from the outermost level to the innermost.

    `weight` has a number for each value. `dense_shape` has the size of each dimension, -1 where it is the
    longest row's.
    """

    def __init__(
        self,
        values: Tensor,
        offsets: Tensor | Sequence[Tensor],
        weight: Tensor | None = None,
        dense_shape: Sequence[int] | None = None,
    ) -> None:
        self._values = values
        self._offsets = [offsets] if isinstance(offsets, Tensor) else list(offsets)
        self._weight = weight
        levels = len(self._offsets)
        self._dense_shape = (-1,) * (levels + 1) if dense_shape is None else tuple(dense_shape)

    def values(self) -> Tensor:
        """All values, one after the other."""
        return self._values

    def set_values(self, values: Tensor) -> None:
        """Replace the values."""
        self._values = values

    def offsets(self) -> list[Tensor]:
        """The offsets, of the outermost level first."""
        return self._offsets

    def weight(self) -> Tensor | None:
        """The weight of each value, if there are weights."""
        return self._weight

    def set_weight(self, weight: Tensor | None) -> None:
        """Replace the weights."""
        self._weight = weight

    def set_dim_by_rank(self, dim: int, rank: int) -> None:
        """Declare the size of a dimension."""
        shape = list(self._dense_shape)
        shape[rank] = dim
        self._dense_shape = tuple(shape)

    def get_shape(self, dim: int) -> int:
        """The size of a dimension: as declared, or that of the longest row."""
        if self._dense_shape[dim] != -1:
            return self._dense_shape[dim]
        if dim in (0, -len(self._dense_shape)):
            return self._offsets[0].numel() - 1
        lengths = self._offsets[dim % len(self._dense_shape) - 1].diff()
        return int(lengths.max()) if lengths.numel() else 0

    def real_shape(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """The sizes of dimensions `start` to `end`."""
        return tuple(self.get_shape(dim) for dim in range(len(self._dense_shape))[slice(start, end)])

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all dimensions."""
        return self.real_shape()

    def size(self) -> tuple[int, ...]:
        """The sizes of all dimensions."""
        return self.real_shape()

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        return len(self._dense_shape)

    @property
    def max_length(self) -> int:
        """The size of the last dimension."""
        return self.get_shape(-1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def to_dense(self, default_value: float = 0.0) -> Tensor:
        """A tensor of the rows, as long as the longest, filled up with a value.

        `kv.Feature.to_dense` makes it. As in RecIS, the dense_shape does not count.
        """
        fill = default_value if self._values.is_floating_point() else int(default_value)
        rows = to_karvan(RaggedTensor(self._values, self._offsets))
        shape = RaggedTensor(self._values, self._offsets).real_shape(1)
        lengths = [max(1, length) for length in shape]
        feature = Feature("x").to_dense(lengths if len(lengths) > 1 else lengths[0], fill)
        dense = _run(feature, rows)
        return cast(Tensor, dense)[(slice(None), *(slice(length) for length in shape))]

    def to_sparse(self) -> Tensor:
        """A sparse tensor of the rows."""
        if len(self._offsets) != 1:
            raise UnsupportedError(
                "to_sparse of lists of lists", "flatten them by kv.Feature.flatten() first."
            )
        lengths = self._offsets[0].diff()
        row = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
        column = torch.arange(row.numel(), device=row.device) - self._offsets[0][row]
        return torch.sparse_coo_tensor(
            torch.stack([row, column]), self._values, self.real_shape(), check_invariants=True
        )

    @staticmethod
    def from_dense(dense: Tensor, check_invalid: bool = False, invalid_value: int = 0) -> RaggedTensor:
        """The rows of a tensor; with check_invalid, without an `invalid_value` at the end of a row."""
        pad = invalid_value if check_invalid else None
        result = _run(Feature("x").to_ragged(pad, trailing=check_invalid), dense)
        return cast(RaggedTensor, to_recis(result))

    @staticmethod
    def from_numpy(values: Any, offsets: Any) -> RaggedTensor:
        """From arrays of numpy."""
        levels = [offsets] if isinstance(offsets, np.ndarray) else offsets
        return RaggedTensor(torch.from_numpy(values), [torch.from_numpy(level) for level in levels])

    def pin_memory(self) -> RaggedTensor:
        """A copy in page-locked memory."""
        return self._with(lambda tensor: tensor.pin_memory())

    def to(self, *args: Any, **options: Any) -> RaggedTensor:
        """A copy on another device, or values of another dtype."""
        device = torch.empty(0).to(*args, **options).device
        moved = self._with(lambda tensor: tensor.to(device))
        moved._values = self._values.to(*args, **options)
        return moved

    def cuda(self) -> RaggedTensor:
        """A copy on the GPU; see `karvan.compat.cuda_fallback`."""
        return self._with(lambda tensor: tensor.cuda())

    def clone(self) -> RaggedTensor:
        """Another object with the same tensors."""
        return self._with(lambda tensor: tensor)

    def _with(self, change: Any) -> RaggedTensor:
        weight = None if self._weight is None else change(self._weight)
        offsets = [change(offset) for offset in self._offsets]
        return RaggedTensor(change(self._values), offsets, weight, self._dense_shape)

    __getitem__ = unsupported_method(
        "an index of a RaggedTensor", "use to_dense()[…], or kv.Feature.truncate."
    )

    def __repr__(self) -> str:
        return (
            f"RaggedTensor(values={self._values}, offsets={self._offsets}, weight={self._weight}, "
            f"dense_shape={self._dense_shape})"
        )


def to_recis(entry: Any) -> Any:
    """An entry of a Karvan batch as RecIS programs know it; what is no ragged stays as it is."""
    if not isinstance(entry, Ragged | NestedRagged):
        return entry
    values = entry.values.view(torch.int8) if entry.values.dtype is torch.uint8 else entry.values
    if isinstance(entry, NestedRagged):
        return RaggedTensor(values, [entry.outer, entry.inner])
    offsets = entry.offsets
    if offsets is None:
        offsets = torch.arange(entry.rows + 1, device=values.device)
    return RaggedTensor(values, [offsets], entry.weights)


def to_karvan(entry: Any) -> Entry:
    """The other way round; bytes of strings, which RecIS has as int8, become uint8."""
    if not isinstance(entry, RaggedTensor):
        return cast(Entry, entry)
    values = entry.values()
    if values.dtype is torch.int8:
        values = values.view(torch.uint8)
    offsets = [offset.to(torch.int64) for offset in entry.offsets()]
    if not offsets:
        return values
    if len(offsets) == 1:
        return Ragged(values, offsets[0], entry.weight())
    if len(offsets) > 2 or entry.weight() is not None:
        raise UnsupportedError(
            f"a RaggedTensor of {len(offsets)} levels{' with weights' if entry.weight() is not None else ''}",
            "expected one level, or two without weights.",
        )
    return NestedRagged(values, offsets[1], offsets[0])


def _run(feature: Feature, entry: Entry) -> Entry:
    result: Entry = FeatureEngine([feature])({"x": entry})["x"]
    return result
