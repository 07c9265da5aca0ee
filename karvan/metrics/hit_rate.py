"""Hit rate."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.metrics.grouped import TopK
from karvan.metrics.ranking import Ranking


class HitRate(TopK):
    """The share of groups that have a positive sample among their `k` highest scores.

    Where equal scores straddle the k-th place, a group counts with the chance of a hit if their order is
    drawn at random. A group without a positive sample has nothing to hit; it is left out, and
    `undefined_groups` counts it.
    """

    def _values(self, ranking: Ranking) -> Tensor:
        positive = (ranking.labels > 0).double()
        sizes = ranking.by_run(torch.ones_like(positive))
        hits = ranking.by_run(positive)
        places = (self.k - ranking.rank_of_run).clamp(min=0).double().minimum(sizes)
        # No hit among `places` drawn out of `sizes`, of which `hits` are positive: C(m-r, s) / C(m, s).
        misses = sizes - hits
        possible = places <= misses
        missed = torch.where(
            possible, torch.exp(_log_choose(misses, places.minimum(misses)) - _log_choose(sizes, places)), 0.0
        )
        none = torch.ones(ranking.groups, dtype=torch.float64)
        none.scatter_reduce_(0, ranking.group_of_run, missed, "prod")
        return torch.where(ranking.by_group(positive) > 0, 1 - none, float("nan"))


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
