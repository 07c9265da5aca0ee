"""`Gauc`: the AUC within groups, as `kv.metrics.GAUC` computes it, inside of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.metrics import GAUC
from karvan.metrics.ranking import Ranking, auc_of_groups


class Gauc(nn.Module):
    """The mean AUC of groups, weighted by their samples: of a batch, and of all batches since the last reset.

    A group counts in each batch by itself, on every rank; one with a single class has no AUC. RecIS loses the
    first and the last group of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._sums = torch.zeros(2, dtype=torch.float64)

    @torch.no_grad()
    def forward(self, labels: Tensor, predictions: Tensor, indicators: Tensor) -> tuple[float, float]:
        """Count a batch: its GAUC and that of all batches, of all ranks; 0 if no group has two classes."""
        batch = GAUC(logits=False)
        batch.add(predictions, labels, groups=indicators)
        values, weights = auc_of_groups(Ranking.of(batch.state()))
        known = ~values.isnan()
        mine = torch.stack([(values[known] * weights[known]).sum(), weights[known].sum()]).double()
        sums = distributed.current().here.sum(mine)
        self._sums = self._sums + sums
        return _ratio(sums), _ratio(self._sums)


def _ratio(sums: Tensor) -> float:
    return float(sums[0] / sums[1]) if sums[1] else 0.0
