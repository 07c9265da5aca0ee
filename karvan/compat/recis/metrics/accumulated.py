"""Numbers that count all batches since a metric's reset: of an evaluation, the newest is the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AccumulatedFloat(float):
    """A number of all batches."""

    accumulated = True


def accumulated_tensor(value: float) -> Tensor:
    """The same as a tensor."""
    made = torch.tensor(value)
    setattr(made, "accumulated", True)  # noqa: B010 - tensors declare no such attribute
    return made


def is_accumulated(value: Any) -> bool:
    """Whether a number is of all batches."""
    return bool(getattr(value, "accumulated", False))
