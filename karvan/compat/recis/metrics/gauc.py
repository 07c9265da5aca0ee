"""`Gauc`: the AUC within groups, as `kv.metrics.GAUC` computes it, inside of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.compat.recis.metrics.accumulated import AccumulatedFloat
from karvan.metrics import GAUC


class Gauc(nn.Module):
    """The mean AUC of groups, weighted by their clicks: of a batch, and of all batches since the last reset.

    A group counts in each batch by itself, on every rank; one with a single class has no AUC. RecIS 1.0 loses
    the first and the last group of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._totals = torch.zeros(2, dtype=torch.float64)

    @torch.no_grad()
    def forward(self, labels: Tensor, predictions: Tensor, indicators: Tensor) -> tuple[float, float]:
        """Count a batch: its GAUC and that of all batches, of all ranks; 0 if no group has two classes."""
        batch = GAUC(logits=False, weighting="clicks")
        batch.add(predictions, labels, groups=indicators)
        totals = distributed.current().here.sum(torch.tensor(batch.totals(), dtype=torch.float64))
        self._totals = self._totals + totals
        return _ratio(totals), AccumulatedFloat(_ratio(self._totals))


def _ratio(totals: Tensor) -> float:
    return float(totals[0] / totals[1]) if totals[1] else 0.0
