"""Metrics that divide one sum by another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from karvan.metrics.base import Metric, State, check_state

# Metrics that are a ratio of two sums over samples.


class RatioOfSums(Metric):
    """The sum of one number per sample over the sum of another, each times the sample's weight."""

    _sums: Tensor

    def _add(self, scores: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        above, below = self._terms(scores, labels)
        if weights is None:
            sums = torch.stack([above.sum(), below.sum()])
        else:
            sums = torch.stack([(above * weights).sum(), (below * weights).sum()])
        self._sums = self._sums.to(sums.device) + sums

    @abstractmethod
    def _terms(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample's share of the numerator and of the denominator."""

    def compute(self) -> float:
        """The ratio; NaN where the denominator is 0."""
        above, below = self._sums.tolist()
        return float(above / below) if below else float("nan")

    def reset(self) -> None:
        """Forget all samples."""
        self._sums = torch.zeros(2, dtype=torch.float64)

    def state(self) -> State:
        """Both sums."""
        return {"sums": self._sums.cpu().clone()}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add another's sums."""
        check_state(self, self.state(), state)
        self._sums = self._sums + state["sums"].to(self._sums)


class WeightedMean(RatioOfSums):
    """The mean of one number per sample."""

    higher_is_better = False

    def _terms(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self._values(scores, labels), torch.ones_like(scores)

    @abstractmethod
    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The number of each sample."""


class MeanDistance(WeightedMean):
    """The mean of a distance between score and label; scores are numbers unless `logits=True`."""

    def __init__(
        self,
        *,
        label: str | None = None,
        output: str | None = None,
        weight: str | None = None,
        logits: bool = False,
    ) -> None:
        super().__init__(label=label, output=output, weight=weight, logits=logits)


# The mean of a number, such as a loss.


class Mean(WeightedMean):
    """The weighted mean of the numbers added, such as losses of a loop of your own.

    `update` takes the model's output and needs no label.

    Args:
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.

    Example:
        >>> mean = kv.metrics.Mean()
        >>> mean.add(torch.tensor(0.5), weights=torch.tensor(3))
        >>> mean.add(torch.tensor(1.0), weights=torch.tensor(1))
        >>> mean.compute()
        0.625
    """

    def __init__(self, *, output: str | None = None, weight: str | None = None) -> None:
        super().__init__(output=output, weight=weight, logits=False)

    def update(self, output: Tensor | Mapping[str, Tensor], batch: Mapping[str, Any]) -> None:
        """Add the model's output, weighted if a weight was named."""
        self.add(self._scores(output), weights=None if self.weight is None else batch[self.weight])

    def add(
        self,
        scores: Tensor,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> None:
        """Add numbers, one or many."""
        super().add(scores, torch.zeros_like(scores) if labels is None else labels, weights, groups)

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores


# Accuracy of yes or no, and of classes.


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
        own_scores = scores.gather(1, numbers.clamp(0, max(classes - 1, 0))) if classes else scores
        columns = torch.arange(classes, device=scores.device)
        above = (scores > own_scores) | ((scores == own_scores) & (columns < numbers))
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


# Calibration.


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


# Logarithmic loss.


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


# Mean absolute error.


class MeanAbsoluteError(MeanDistance):
    """The mean of |score - label|; with `logits=True`, of probabilities.

    Args:
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.

    Example:
        >>> error = kv.metrics.MeanAbsoluteError()
        >>> error.update(torch.tensor([1.0, 2.0]), {"label": torch.zeros(2)})
        >>> error.compute()
        1.5
    """

    short_name = "mae"

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).abs()


# Mean squared error.


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
