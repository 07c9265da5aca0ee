"""Operations on values and offsets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from karvan.compat.recis.features.op import FeatureCross
from karvan.compat.recis.ragged.tensor import RaggedTensor
from karvan.compat.unsupported import missing_names


def dense_to_ragged(
    tensor: Tensor, check_invalid: bool = False, invalid_value: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Values and offsets of a tensor; with check_invalid without an `invalid_value` at the end of a row."""
    made = RaggedTensor.from_dense(tensor, check_invalid, invalid_value)
    return made.values(), made.offsets()


def ragged_to_dense(values: Tensor, offsets: Sequence[Tensor], default_value: float = 0.0) -> Tensor:
    """A tensor of the rows, filled up with a value."""
    return RaggedTensor(values, offsets).to_dense(default_value)


def ragged_to_sparse(values: Tensor, row_splits: Sequence[Tensor]) -> Tensor:
    """A sparse tensor of the rows."""
    return RaggedTensor(values, row_splits).to_sparse()


def feature_cross_ragged(
    x_val: Tensor,
    x_offsets: Tensor,
    y_val: Tensor,
    y_offsets: Tensor,
    x_weight: Tensor | None = None,
    y_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All pairs of ids of two entries, hashed: values, offsets and weights, which are 1 if not given."""
    x = RaggedTensor(x_val, x_offsets, torch.ones(len(x_val)) if x_weight is None else x_weight)
    y = RaggedTensor(y_val, y_offsets, torch.ones(len(y_val)) if y_weight is None else y_weight)
    made = FeatureCross()([x, y])
    return made.values(), made.offsets()[0], made.weight()


_CUT = ("fused_ragged_cutoff_2D", "fused_ragged_cutoff_3D", "ragged_topk_index_cutoff")
__getattr__ = missing_names(
    "recis.nn.functional.ragged_ops",
    {
        **dict.fromkeys(_CUT, "use SequenceTruncate."),
        "ragged_tile": 'use EmbeddingOption(combiner="tile").',
        "index_select_ragged_by_padded_index": "use to_dense() and torch.gather.",
    },
)
