"""Mean and standard deviation of a stream of values, in one pass and double precision."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Moments:
    """Count, mean and sum of squared deviations; batches are merged as Chan, Golub and LeVeque (1979) do."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, values: Tensor) -> None:
        """Take more values in; NaN is a missing value and does not count."""
        known = values.detach().to(torch.float64).reshape(-1)
        known = known[~known.isnan()]
        count = known.shape[0]
        if count == 0:
            return
        mean = float(known.mean())
        squares = float((known - mean).square().sum())
        total, apart = self.count + count, mean - self.mean
        self._squares += squares + apart * apart * self.count * count / total
        self.mean += apart * count / total
        self.count = total

    @property
    def std(self) -> float:
        """The standard deviation of all values; 1 where it is 0, so that a constant becomes 0, not NaN."""
        return math.sqrt(self._squares / self.count) or 1.0
