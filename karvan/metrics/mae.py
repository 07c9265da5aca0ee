"""Mean absolute error."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.ratio_of_sums import MeanDistance


class MeanAbsoluteError(MeanDistance):
    """The mean of |score - label|; with `logits=True`, of probabilities."""

    short_name = "mae"

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).abs()
