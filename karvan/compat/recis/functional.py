"""Operations on tensors, each by the feature operation that does the same.

"gpu" in a name says what RecIS needs; here any device will do. Strings are bytes of int8 and their offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from karvan.compat.recis.features import Bucketize, FeatureCross, Hash, Mod
from karvan.compat.recis.ragged import RaggedTensor
from karvan.features import Feature, FeatureEngine
from karvan.ragged import Ragged


def bucketize(input: Tensor, boundaries: Tensor | Sequence[float]) -> Tensor:
    """How many boundaries are not above each number."""
    return cast(Tensor, Bucketize(boundaries)(input))


def bucketize_mod(input: Tensor, bucket: int) -> Tensor:
    """The remainder of ids, read as unsigned."""
    return cast(Tensor, Mod(bucket)(input))


def multi_hash(
    input: Tensor, muls: Tensor | Sequence[int], primes: Tensor | Sequence[int], bucket_num: int
) -> list[Tensor]:
    """For each of the factors and primes the remainders `input * mul % prime % bucket_num`, from 0 on."""
    pairs = zip(torch.as_tensor(muls).tolist(), torch.as_tensor(primes).tolist(), strict=True)
    return [(input * mul).remainder(prime).remainder(bucket_num) for mul, prime in pairs]


def fused_bucketize_gpu(values: Sequence[Tensor], boundaries: Sequence[Tensor]) -> list[Tensor]:
    """Give each tensor the positions of its values among its boundaries."""
    return [bucketize(value, bounds) for value, bounds in zip(values, boundaries, strict=True)]


def fused_uint64_mod_gpu(values: Sequence[Tensor], mods: Sequence[int] | Tensor) -> list[Tensor]:
    """Give each tensor the remainders of its values by its modulus."""
    moduli = torch.as_tensor(mods).tolist()
    return [bucketize_mod(value, modulus) for value, modulus in zip(values, moduli, strict=True)]


def fused_multi_hash(
    inputs: Sequence[Tensor], muls: Sequence[Tensor], primes: Sequence[Tensor], bucket_nums: Sequence[Tensor]
) -> list[Tensor]:
    """For each input, one after the other, its remainders by all of its factors, primes and buckets."""
    return [
        (value * mul).remainder(prime).remainder(bucket)
        for value, *settings in zip(inputs, muls, primes, bucket_nums, strict=True)
        for mul, prime, bucket in zip(*(setting.tolist() for setting in settings), strict=True)
    ]


def fused_int64_to_string_int8(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Integers as text: the bytes, and the length of each text."""
    engine = FeatureEngine([Feature("x").to_text()])
    texts = [engine({"x": value})["x"] for value in inputs]
    rows = [text for text in texts if isinstance(text, Ragged)]
    return [text.values.view(torch.int8) for text in rows], [text.lengths() for text in rows]


def farmhash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """The ids of the strings of each tensor."""
    return _hashed("farm", inputs, splits)


def murmurhash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """The ids of the strings of each tensor."""
    return _hashed("murmur", inputs, splits)


def _hashed(kind: str, inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    texts = [
        RaggedTensor(values, [torch.arange(offsets.numel()), offsets])
        for values, offsets in zip(inputs, splits, strict=True)
    ]
    return [Hash(kind)(text).values() for text in texts]


_INSTEAD = 'use "farm" or "murmur".'


def dense_to_ragged(
    tensor: Tensor, check_invalid: bool = False, invalid_value: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Values and offsets of a tensor; with check_invalid without an `invalid_value` at the end of a row."""
    ragged = RaggedTensor.from_dense(tensor, check_invalid, invalid_value)
    return ragged.values(), ragged.offsets()


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
    result = FeatureCross()([x, y])
    return result.values(), result.offsets()[0], result.weight()


_CUT = ("fused_ragged_cutoff_2D", "fused_ragged_cutoff_3D", "ragged_topk_index_cutoff")
