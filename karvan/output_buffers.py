"""Output tensors in memory of the native pool."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from karvan import _native


def empty(*shape: int) -> Tensor:
    """Uninitialised floats from the native pool; fresh memory would cost page faults in every step."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape)
    # Not a view of a flat tensor: users may change outputs in place, like those of any other module.
    return torch.frombuffer(_native.Buffer(4 * count), dtype=torch.float32, count=count).resize_(shape)
