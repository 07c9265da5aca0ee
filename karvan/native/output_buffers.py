"""Output tensors in memory of the native pool."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from karvan.native.core import _native, is_built

_is_built = is_built()


def empty(*shape: int) -> Tensor:
    """Uninitialised floats from the native pool; fresh memory would cost page faults in every step.

    Without the native core they are in fresh memory.
    """
    count = math.prod(shape)
    if count == 0 or not _is_built:
        return torch.empty(shape)
    # Not a view of a flat tensor: users may change outputs in place, like those of any other module.
    return torch.frombuffer(_native.Buffer(4 * count), dtype=torch.float32, count=count).resize_(shape)
