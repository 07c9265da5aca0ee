"""Metrics that are a mean over groups of samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from karvan.metrics.base import Metric, State
from karvan.metrics.ranking import Ranking, Samples, auc_of_groups


class Grouped(Metric):
    """A weighted mean over groups, which `group` names in the batch: integers, one for each sample."""

    higher_is_better = True

    def __init__(
        self,
        group: str = "user",
        *,
        label: str | None = None,
        output: str | None = None,
        weight: str | None = None,
        logits: bool = True,
    ) -> None:
        super().__init__(label=label, output=output, weight=weight, logits=logits)
        self.group = group

    def _add(self, scores: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        if groups is None:
            raise ValueError(f"{type(self).__name__}.add expects groups, one for each score, got None.")
        self._samples.add(scores, labels, weights, groups)

    @abstractmethod
    def _by_group(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        """Each group's number, NaN where it has none, and its weight in the mean."""

    def compute(self) -> float:
        """The mean over the groups that have a number; NaN if there are none."""
        total, weight = self.totals()
        return total / weight if weight else float("nan")

    def totals(self) -> tuple[float, float]:
        """The sum of weight times number over the groups that have a number, and of their weights.

        Sums of several metrics add up to those of all their groups, where groups of the same name stay apart.
        """
        state = self._samples.state()
        if bool(state["scores"].isnan().any()):
            return float("nan"), float("nan")
        values, weights = self._by_group(Ranking.of(state))
        valid = ~values.isnan()
        return float((values[valid] * weights[valid]).sum()), float(weights[valid].sum())

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return Ranking.of(self._samples.state()).groups

    @property
    def undefined_groups(self) -> int:
        """How many of them have no number and are skipped in the mean."""
        return int(self._by_group(Ranking.of(self._samples.state()))[0].isnan().sum())

    def reset(self) -> None:
        """Forget all samples."""
        self._samples = Samples()

    def state(self) -> State:
        """All samples."""
        return self._samples.state()

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add another's samples."""
        self._samples.merge(self, state)


class TopK(Grouped):
    """A mean over groups of a number about the `k` highest scores of each.

    Groups count the same, or as the mean weight of their samples where a weight is named.
    """

    def __init__(
        self,
        k: int = 10,
        group: str = "user",
        *,
        label: str | None = None,
        output: str | None = None,
        weight: str | None = None,
        logits: bool = True,
    ) -> None:
        if k < 1:
            raise ValueError(f"{type(self).__name__} expects k of at least 1, got {k}.")
        super().__init__(group, label=label, output=output, weight=weight, logits=logits)
        self.k = k

    def _by_group(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        sizes = ranking.by_group(torch.ones_like(ranking.scores))
        return self._values(ranking), ranking.by_group(ranking.weights) / sizes

    @abstractmethod
    def _values(self, ranking: Ranking) -> Tensor:
        """Each group's number, NaN where it has none."""


# AUC within groups.


_WEIGHTINGS = ("impressions", "clicks")


class GAUC(Grouped):
    """The mean AUC of groups, usually users, weighted by their impressions.

    A group is one group wherever its samples come from: other batches, other ranks. A group with only one
    class has no AUC: the mean skips it, and `undefined_groups` counts it. It is exact: all samples are stored
    until `reset()`, 32 bytes each.

    Args:
        group: The column of groups in the batch, such as users: integers, one for each sample.
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.
        weighting: What weights a group: "impressions", the sum of its weights; or "clicks", the sum of weight
            times label, as in RecIS.

    Raises:
        ValueError: `weighting` is unknown.

    Example:
        >>> gauc = kv.metrics.GAUC(group="user")
        >>> batch = {
        ...     "user": torch.tensor([1, 1, 2, 2]),
        ...     "label": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        ... }
        >>> gauc.update(torch.tensor([2.0, 1.0, -1.0, 1.0]), batch)
        >>> gauc.compute()
        0.5
    """

    def __init__(
        self,
        group: str = "user",
        *,
        label: str | None = None,
        output: str | None = None,
        weight: str | None = None,
        logits: bool = True,
        weighting: str = "impressions",
    ) -> None:
        if weighting not in _WEIGHTINGS:
            raise ValueError(f"GAUC expects weighting 'impressions' or 'clicks', got {weighting!r}.")
        super().__init__(group, label=label, output=output, weight=weight, logits=logits)
        self.weighting = weighting

    def _by_group(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        values, impressions = auc_of_groups(ranking)
        if self.weighting == "impressions":
            return values, impressions
        return values, ranking.by_group(ranking.weights * ranking.labels)


# Hit rate.


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


# Normalised discounted cumulative gain.


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
