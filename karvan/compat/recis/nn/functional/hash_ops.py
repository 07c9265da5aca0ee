"""Hashes of strings, as bytes of int8 and the offsets of strings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from karvan.compat.recis.features.op import Hash
from karvan.compat.recis.ragged.tensor import RaggedTensor
from karvan.compat.unsupported import missing_names


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
__getattr__ = missing_names("recis.nn.functional.hash_ops", {"djb2hash": _INSTEAD, "sdbmhash": _INSTEAD})
