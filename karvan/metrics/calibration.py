"""Calibration."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.ratio_of_sums import RatioOfSums


class Calibration(RatioOfSums):
    """The sum of predictions over the sum of labels: 1 is ideal, above it predictions are too high.

    It is NaN where the labels sum up to 0.

    Args:
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.

    Example:
        >>> calibration = kv.metrics.Calibration(logits=False)
        >>> batch = {"label": torch.tensor([1.0, 0.0])}
        >>> calibration.update(torch.tensor([0.75, 0.5]), batch)
        >>> calibration.compute()
        1.25
    """

    higher_is_better = False

    def _terms(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return scores, labels
