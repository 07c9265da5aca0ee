"""Accuracy."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.ratio_of_sums import WeightedMean


class Accuracy(WeightedMean):
    """The fraction of samples whose score and label agree: a score is positive from `threshold` on.

    A label is positive from 0.5 on.
    """

    higher_is_better = True

    def __init__(
        self,
        threshold: float = 0.5,
        *,
        label: str = "label",
        output: str | None = None,
        weight: str | None = None,
        logits: bool = True,
    ) -> None:
        super().__init__(label=label, output=output, weight=weight, logits=logits)
        self.threshold = threshold

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        right = ((scores >= self.threshold) == (labels >= 0.5)).double()
        return right + 0 * scores  # a score that is NaN is neither right nor wrong
