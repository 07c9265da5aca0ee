"""Metrics that are a ratio of two sums over samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from karvan.metrics.base import Metric, State, check_state


class RatioOfSums(Metric):
    """The sum of one number per sample over the sum of another, each times the sample's weight."""

    _sums: Tensor

    def _add(self, scores: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        above, below = self._terms(scores, labels)
        if weights is None:
            sums = torch.stack([above.sum(), below.sum()])
        else:
            sums = torch.stack([(above * weights).sum(), (below * weights).sum()])
        self._sums = self._sums.to(sums.device) + sums

    @abstractmethod
    def _terms(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample's share of the numerator and of the denominator."""

    def compute(self) -> float:
        """The ratio; NaN where the denominator is 0."""
        above, below = self._sums.tolist()
        return float(above / below) if below else float("nan")

    def reset(self) -> None:
        """Forget all samples."""
        self._sums = torch.zeros(2, dtype=torch.float64)

    def state(self) -> State:
        """Both sums."""
        return {"sums": self._sums.cpu().clone()}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add another's sums."""
        check_state(self, self.state(), state)
        self._sums = self._sums + state["sums"].to(self._sums)


class WeightedMean(RatioOfSums):
    """The mean of one number per sample."""

    higher_is_better = False

    def _terms(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self._values(scores, labels), torch.ones_like(scores)

    @abstractmethod
    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The number of each sample."""


class MeanDistance(WeightedMean):
    """The mean of a distance between score and label; scores are numbers unless `logits=True`."""

    def __init__(
        self,
        *,
        label: str | None = None,
        output: str | None = None,
        weight: str | None = None,
        logits: bool = False,
    ) -> None:
        super().__init__(label=label, output=output, weight=weight, logits=logits)
