"""Logarithmic loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from karvan.metrics.ratio_of_sums import WeightedMean

_EPSILON = torch.finfo(torch.float64).eps


class BinaryCrossEntropy(WeightedMean):
    """The mean of -log(probability of what happened), in nats: the logarithmic loss.

    Probabilities are clipped to 2.2e-16 from 0 and 1, as scikit-learn does, so that a wrong probability of 0
    or 1 costs 36 and not infinity. Labels may be between 0 and 1.
    """

    short_name = "logloss"

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        # -log(1 - p) is softplus(logit); torch.log would wake all threads, which takes longer than this.
        logits = torch.logit(scores, _EPSILON)
        return softplus(logits, threshold=40) - labels * logits
