"""Operations on the values of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from karvan.compat.recis.features.op import Bucketize, Mod
from karvan.compat.unsupported import missing_names


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


__getattr__ = missing_names(
    "recis.nn.functional.array_ops", {"parse_sample_id": "split the strings before the data is written."}
)
