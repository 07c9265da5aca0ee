"""Mean squared error."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.ratio_of_sums import MeanDistance


class MeanSquaredError(MeanDistance):
    """The mean of (score - label)²; with `logits=True`, of probabilities: the Brier score.

    Args:
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.

    Example:
        >>> error = kv.metrics.MeanSquaredError()
        >>> error.update(torch.tensor([1.0, 2.0]), {"label": torch.zeros(2)})
        >>> error.compute()
        2.5
    """

    short_name = "mse"

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).square()
