"""The counters of `MinCount`: how often keys without a row have been seen; csrc/table/admission_filter.h."""

from __future__ import annotations

import torch
from torch import Tensor


def new_filter(slots: int, device: torch.device) -> Tensor:
    """The counters of a filter, all 0. They are wider than the CPU's, and read as at most 255."""
    blocks = (max(slots, 1) + 64 * 256 - 1) // (64 * 256) * 256
    return torch.zeros(blocks * 64, dtype=torch.int32, device=device)
