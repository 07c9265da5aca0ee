"""Accuracy of yes or no, and of classes."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.metrics.ratio_of_sums import WeightedMean


class Accuracy(WeightedMean):
    """The fraction of samples with a score that agrees with the label.

    Args:
        threshold: A score is positive from this on; a label is positive from 0.5 on.
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.

    Example:
        >>> accuracy = kv.metrics.Accuracy()
        >>> batch = {"label": torch.tensor([1.0, 0.0])}
        >>> accuracy.update(torch.tensor([2.0, 1.0]), batch)
        >>> accuracy.compute()
        0.5
    """

    higher_is_better = True

    def __init__(
        self,
        threshold: float = 0.5,
        *,
        label: str | None = None,
        output: str | None = None,
        weight: str | None = None,
        logits: bool = True,
    ) -> None:
        super().__init__(label=label, output=output, weight=weight, logits=logits)
        self.threshold = threshold

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        right = ((scores >= self.threshold) == (labels >= 0.5)).double()
        return right + 0 * scores  # a score that is NaN is neither right nor wrong


class ClassAccuracy(WeightedMean):
    """The fraction of samples with a class among the highest scores, (samples, classes).

    A label is the number of a class, from 0; one that is no class is never right. Of equal scores, those of
    lower classes are higher.

    Args:
        top: How many of the highest scores count.
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.

    Raises:
        ValueError: `top` is below 1.

    Example:
        >>> accuracy = kv.metrics.ClassAccuracy(top=1)
        >>> scores = torch.tensor([[0.1, 2.0, 0.3], [1.0, 0.0, 0.5]])
        >>> accuracy.update(scores, {"label": torch.tensor([1, 2])})
        >>> accuracy.compute()
        0.5
    """

    higher_is_better = True

    def __init__(
        self, top: int = 1, *, label: str | None = None, output: str | None = None, weight: str | None = None
    ) -> None:
        if top < 1:
            raise ValueError(f"ClassAccuracy expects top of at least 1, got {top}.")
        super().__init__(label=label, output=output, weight=weight, logits=False)
        self.top = top

    @torch.no_grad()
    def add(
        self, scores: Tensor, labels: Tensor, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> None:
        """Add samples: a score for each class, labels and weights."""
        self._check_beside("labels", labels, scores)
        scores = scores.detach().double()
        classes = scores.shape[1]
        numbers = labels.detach().reshape(-1, 1).to(scores.device, torch.int64)
        own = scores.gather(1, numbers.clamp(0, max(classes - 1, 0))) if classes else scores
        columns = torch.arange(classes, device=scores.device)
        above = (scores > own) | ((scores == own) & (columns < numbers))
        right = (above.sum(1) < self.top) & (numbers[:, 0] >= 0) & (numbers[:, 0] < classes)
        # A sample with a score that is NaN is neither right nor wrong.
        super().add(right.double() + 0 * scores.sum(1), labels, weights, groups)

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores

    def _check_beside(self, role: str, tensor: Tensor, scores: Tensor) -> None:
        if scores.dim() == 1:  # whether each sample is right
            return super()._check_beside(role, tensor, scores)
        if scores.dim() != 2:
            raise ValueError(
                f"ClassAccuracy expects a score for each sample and class, got shape {tuple(scores.shape)}."
            )
        if tensor.numel() != scores.shape[0]:
            raise ValueError(
                f"Expected {scores.shape[0]} {role}, one for each sample, got {tuple(tensor.shape)}."
            )
        return None
