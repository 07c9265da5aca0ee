"""Normalised discounted cumulative gain."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.metrics.grouped import TopK
from karvan.metrics.ranking import Ranking


class NDCG(TopK):
    """The mean NDCG@k of groups: labels are gains, rank r (from 1) is discounted by log2(r + 1).

    As in scikit-learn, samples with equal scores share their ranks: each has the mean of their discounts. A
    group without a positive label has no ideal order; it is skipped, and `undefined_groups` counts it.
    """

    def _values(self, ranking: Ranking) -> Tensor:
        ideal = Ranking.of(
            {
                "groups": ranking.group,
                "scores": ranking.labels,
                "labels": ranking.labels,
                "weights": ranking.weights,
            }
        )
        best = self._gain(ideal)
        return torch.where(best > 0, self._gain(ranking) / best, float("nan"))

    def _gain(self, ranking: Ranking) -> Tensor:
        rank = torch.arange(len(ranking.scores)) - ranking.start[ranking.group]
        discount = torch.where(rank < self.k, 1 / torch.log2(rank.double() + 2), 0.0)
        sizes = ranking.by_run(torch.ones_like(ranking.scores))
        shared = ranking.by_run(discount) / sizes
        return ranking.by_group(ranking.labels * shared[ranking.run])
