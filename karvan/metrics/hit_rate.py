"""Hit rate."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.metrics.grouped import TopK
from karvan.metrics.ranking import Ranking


class HitRate(TopK):
    """The fraction of groups with a positive sample among their `k` highest scores.

    Where equal scores are on both sides of rank k, a group counts with the probability of a hit in random
    order. A group without a positive sample is skipped, and `undefined_groups` counts it.

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
        >>> hits = kv.metrics.HitRate(k=1, group="user")
        >>> batch = {
        ...     "user": torch.tensor([1, 1, 2, 2]),
        ...     "label": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        ... }
        >>> hits.update(torch.tensor([2.0, 1.0, -1.0, 1.0]), batch)
        >>> hits.compute()
        0.5
    """

    def _values(self, ranking: Ranking) -> Tensor:
        positive = (ranking.labels > 0).double()
        sizes = ranking.by_run(torch.ones_like(positive))
        hits = ranking.by_run(positive)
        draws = (self.k - ranking.rank_of_run).clamp(min=0).double().minimum(sizes)
        # No hit among `draws` drawn out of `sizes`, of which `hits` are positive: C(m-r, s) / C(m, s).
        misses = sizes - hits
        possible = draws <= misses
        missed = torch.where(
            possible, torch.exp(_log_choose(misses, draws.minimum(misses)) - _log_choose(sizes, draws)), 0.0
        )
        none = torch.ones(ranking.groups, dtype=torch.float64)
        none.scatter_reduce_(0, ranking.group_of_run, missed, "prod")
        return torch.where(ranking.by_group(positive) > 0, 1 - none, float("nan"))


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
