"""Mean squared error."""

from __future__ import annotations

from torch import Tensor

from karvan.train.metrics.sums import WeightedMean


class MSE(WeightedMean):
    """The mean of (score - label)²; with `logits=True`, of probabilities: the Brier score."""

    def __init__(
        self,
        *,
        label: str = "label",
        output: str | None = None,
        weight: str | None = None,
        logits: bool = False,
    ) -> None:
        super().__init__(label=label, output=output, weight=weight, logits=logits)

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).square()
