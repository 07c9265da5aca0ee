"""The mean of a number, such as a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from karvan.metrics.ratio_of_sums import WeightedMean


class Mean(WeightedMean):
    """The weighted mean of the numbers added, such as losses of a loop of your own.

    `update` takes the model's output and needs no label.

    Args:
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.

    Example:
        >>> mean = kv.metrics.Mean()
        >>> mean.add(torch.tensor(0.5), weights=torch.tensor(3))
        >>> mean.add(torch.tensor(1.0), weights=torch.tensor(1))
        >>> mean.compute()
        0.625
    """

    def __init__(self, *, output: str | None = None, weight: str | None = None) -> None:
        super().__init__(output=output, weight=weight, logits=False)

    def update(self, output: Tensor | Mapping[str, Tensor], batch: Mapping[str, Any]) -> None:
        """Add the model's output, weighted if a weight was named."""
        self.add(self._scores(output), weights=None if self.weight is None else batch[self.weight])

    def add(
        self,
        scores: Tensor,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> None:
        """Add numbers, one or many."""
        super().add(scores, torch.zeros_like(scores) if labels is None else labels, weights, groups)

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores
