"""Metrics that are a mean over groups of samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from karvan.metrics.base import Metric, State
from karvan.metrics.ranking import Ranking, Samples


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
        known = ~values.isnan()
        return float((values[known] * weights[known]).sum()), float(weights[known].sum())

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
