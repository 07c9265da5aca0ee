"""The same operation on several tensors; "gpu" in a name says what RecIS needs, here any device will do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from karvan.compat.recis.nn.functional.array_ops import bucketize, bucketize_mod
from karvan.compat.unsupported import missing_names
from karvan.features import Feature, FeatureEngine
from karvan.ragged import Ragged


def fused_bucketize_gpu(values: Sequence[Tensor], boundaries: Sequence[Tensor]) -> list[Tensor]:
    """Give each tensor the positions of its values among its boundaries."""
    return [bucketize(each, bounds) for each, bounds in zip(values, boundaries, strict=True)]


def fused_uint64_mod_gpu(values: Sequence[Tensor], mods: Sequence[int] | Tensor) -> list[Tensor]:
    """Give each tensor the remainders of its values by its modulus."""
    moduli = torch.as_tensor(mods).tolist()
    return [bucketize_mod(each, modulus) for each, modulus in zip(values, moduli, strict=True)]


def fused_multi_hash(
    inputs: Sequence[Tensor],
    muls: Sequence[Tensor],
    primes: Sequence[Tensor],
    bucket_nums: Sequence[Tensor],
) -> list[Tensor]:
    """For each input, one after the other, its remainders by all of its factors, primes and buckets."""
    return [
        (each * mul).remainder(prime).remainder(bucket)
        for each, *settings in zip(inputs, muls, primes, bucket_nums, strict=True)
        for mul, prime, bucket in zip(*(setting.tolist() for setting in settings), strict=True)
    ]


def fused_int64_to_string_int8(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Integers as text: the bytes, and the length of each text."""
    engine = FeatureEngine([Feature("x").to_text()])
    texts = [engine({"x": each})["x"] for each in inputs]
    rows = [text for text in texts if isinstance(text, Ragged)]
    return [text.values.view(torch.int8) for text in rows], [text.lengths() for text in rows]


__getattr__ = missing_names(
    "recis.nn.functional.fused_ops",
    {"fused_ids_encode_gpu": "tables are never merged: look each of them up by its ids."},
)
