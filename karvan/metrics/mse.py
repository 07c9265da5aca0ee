"""Mean squared error."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.ratio_of_sums import MeanDistance


class MeanSquaredError(MeanDistance):
    """The mean of (score - label)²; with `logits=True`, of probabilities: the Brier score."""

    short_name = "mse"

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).square()
