"""Normalised discounted cumulative gain."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.metrics.grouped import TopK
from karvan.metrics.ranking import Ranking


class NDCG(TopK):
    """The mean NDCG@k of groups: labels are gains, rank r (from 1) is discounted by log2(r + 1).

    As in scikit-learn, samples with equal scores share their ranks. A group without a positive label is
    skipped, and `undefined_groups` counts it.

    Args:
        k: How many of the highest scores of a group count.
        group: The column of groups in the batch, such as users: integers, one for each sample.
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights; a group counts as their mean. By default groups count the same.
        logits: Whether the model gives logits, which become probabilities.

    Raises:
        ValueError: `k` is below 1.

    Example:
        >>> ndcg = kv.metrics.NDCG(k=2, group="user")
        >>> batch = {
        ...     "user": torch.tensor([1, 1, 1]),
        ...     "label": torch.tensor([1.0, 0.0, 0.0]),
        ... }
        >>> ndcg.update(torch.tensor([0.5, 2.0, -1.0]), batch)
        >>> round(ndcg.compute(), 4)
        0.6309
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
