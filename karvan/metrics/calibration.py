"""Calibration."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.ratio_of_sums import RatioOfSums


class Calibration(RatioOfSums):
    """The sum of predictions over the sum of labels: 1 is ideal, above it predictions are too high.

    The best value is 1, so neither direction is better; `higher_is_better` is False only because it must have
    a value. NaN where the labels sum up to 0.
    """

    higher_is_better = False

    def _terms(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return scores, labels
