"""Logarithmic loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from karvan.metrics.ratio_of_sums import WeightedMean

_EPSILON = torch.finfo(torch.float64).eps


class BinaryCrossEntropy(WeightedMean):
    """The mean of -log(probability of what happened), in nats: the logarithmic loss.

    Probabilities are clipped to 2.2e-16 from 0 and 1, as in scikit-learn. Labels may be between 0 and 1.

    Args:
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.

    Example:
        >>> logloss = kv.metrics.BinaryCrossEntropy()
        >>> logloss.update(torch.zeros(2), {"label": torch.tensor([1.0, 0.0])})
        >>> round(logloss.compute(), 4)
        0.6931
    """

    short_name = "logloss"

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        # -log(1 - p) is softplus(logit); torch.log would wake all threads, which takes longer than this.
        logits = torch.logit(scores, _EPSILON)
        return softplus(logits, threshold=40) - labels * logits
