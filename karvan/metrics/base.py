"""`Metric`: the base of all metrics, which selects and checks their tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from karvan.argument_checks import listed
from karvan.label_columns import check_weights, label_of_head, refuse_missing
from karvan.ragged import Ragged

State: TypeAlias = dict[str, Tensor]


@dataclass(eq=False, repr=False, kw_only=True)
class Metric(ABC):
    """The base class of metrics: a number about scores and labels, gathered batch by batch.

    Tensors may be on any device and of any dtype; sums are float64.

    Args:
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.

    Example:
        >>> mean, other = kv.metrics.Mean(), kv.metrics.Mean()
        >>> mean.add(torch.tensor([1.0, 2.0]))
        >>> other.add(torch.tensor([6.0]))
        >>> mean.merge(other.state())
        >>> mean.compute()
        3.0
    """

    label: str | None = None
    output: str | None = None
    weight: str | None = None
    logits: bool = True

    higher_is_better: ClassVar[bool]
    short_name: ClassVar[str]  # its name in reports unless a config names it; stored in histories
    label_is_of_loss = False  # whether a Trainer has set it; another Trainer then sets it anew
    group = cast(str | None, None)  # the column by which samples are grouped; metrics of groups have a field

    def __post_init__(self) -> None:
        self.reset()

    def __init_subclass__(cls) -> None:
        if "short_name" not in vars(cls):
            cls.short_name = cls.__name__.lower()

    @torch.no_grad()
    def update(self, output: Tensor | Mapping[str, Tensor], batch: Mapping[str, Any]) -> None:
        """Add a batch and the model's output for it.

        Args:
            output: The model's output.
            batch: The batch, with labels and what else the metric needs.

        Raises:
            KeyError: The batch or the output lacks a name.
            ValueError: Scores and labels have different shapes.
        """
        self.add_selection(self.select(output, batch))

    def select(self, output: Tensor | Mapping[str, Tensor], batch: Mapping[str, Any]) -> State:
        """Return what `update` needs of a batch, so that it can be counted elsewhere.

        Args:
            output: The model's output.
            batch: The batch.

        Returns:
            Tensors for `add_selection`.
        """
        scores = self._scores(output)
        selection = {"scores": scores}
        for role, name in (
            ("labels", self.label or "label"),
            ("weights", self.weight),
            ("groups", self.group),
        ):
            if name is not None:
                selection[role] = self._column(batch, name, role.removesuffix("s"))
                self._check_beside(role, selection[role], scores)
        return selection

    @torch.no_grad()
    def add_selection(self, selection: Mapping[str, Tensor]) -> None:
        """Add what `select` returned, here or in another process.

        Args:
            selection: The tensors.
        """
        scores = selection["scores"]
        self.add(
            scores.double().sigmoid() if self.logits else scores,
            selection["labels"],
            selection.get("weights"),
            selection.get("groups"),
        )

    @torch.no_grad()
    def add(
        self, scores: Tensor, labels: Tensor, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> None:
        """Add samples.

        Args:
            scores: The scores as the metric needs them; `logits` does not apply.
            labels: The labels.
            weights: The weights; by default 1.
            groups: The groups, for metrics of groups.
        """
        scores = torch.as_tensor(scores).detach().reshape(-1).double()
        labels = self._beside("labels", labels, scores).double()
        if weights is not None:
            weights = torch.as_tensor(weights)
            if weights.is_cpu:  # on a GPU a check would wait for it; a Trainer checks batches before
                check_weights(weights, self.weight)
            weights = self._beside("weights", weights, scores).double()
        if groups is not None:
            groups = self._beside("groups", groups, scores).long()
        if scores.numel():
            self._add(scores, labels, weights, groups)

    @abstractmethod
    def _add(self, scores: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        """Add at least one sample; all tensors are (n,) on one device, float64 and, for groups, int64."""

    @abstractmethod
    def compute(self) -> float:
        """Compute the number.

        Returns:
            The number; NaN where there is none, as without samples or where a score was NaN.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget all samples."""

    @abstractmethod
    def state(self) -> State:
        """Copy everything gathered.

        Returns:
            Flat tensors on the CPU.
        """

    @abstractmethod
    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add what another metric of the same settings has gathered, for example on another rank.

        Args:
            state: What its `state` returned.

        Raises:
            ValueError: The state is of other settings.
        """

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace everything gathered.

        Args:
            state: What `state` of another metric returned.
        """
        before = self.state()
        self.reset()
        try:
            self.merge(state)
        except ValueError:
            self.merge(before)
            raise

    def _scores(self, output: Tensor | Mapping[str, Tensor]) -> Tensor:
        if isinstance(output, Tensor):
            if self.output is not None:
                raise ValueError(
                    f"{type(self).__name__} expects an output '{self.output}', but the model gave one tensor."
                )
            return output.detach()
        names = ", ".join(map(str, output)) or "none"
        if self.output is None:
            raise ValueError(
                f"{type(self).__name__} expects output=, the name of one of the model's outputs: {names}."
            )
        if self.output not in output:
            raise KeyError(f"{type(self).__name__}: no output '{self.output}' among the model's: {names}.")
        return output[self.output].detach()

    def _check_beside(self, role: str, tensor: Tensor, scores: Tensor) -> None:
        if tensor.numel() != scores.numel():
            raise ValueError(
                f"Expected {scores.numel()} {role}, one for each score, got {tuple(tensor.shape)}."
            )
        if role == "groups" and tensor.is_floating_point():
            raise TypeError(f"{type(self).__name__} expects groups of integers, got {tensor.dtype}.")

    def _beside(self, role: str, tensor: Tensor, scores: Tensor) -> Tensor:
        tensor = torch.as_tensor(tensor)
        self._check_beside(role, tensor, scores)
        return tensor.detach().reshape(-1).to(scores.device)

    def _column(self, batch: Mapping[str, Any], name: str, role: str) -> Tensor:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"{type(self).__name__}.update expects the model's output and its batch, got "
                f"{type(batch).__name__}: add(scores, labels) takes tensors."
            )
        if name not in batch:
            raise KeyError(
                f"{type(self).__name__} expects the {role} '{name}' in the batch, which has: "
                f"{listed(name, batch)} Name the right column: {type(self).__name__}({role}=…)."
            )
        entry = batch[name]
        if isinstance(entry, Ragged) and entry.offsets is None:
            entry = entry.values
        entry = refuse_missing(name, entry)
        if not isinstance(entry, Tensor):
            kind = "lists or strings" if isinstance(entry, Ragged) else type(entry).__name__
            raise TypeError(
                f"{type(self).__name__} expects the {role} '{name}' to be a tensor with one value per sample,"
                f" got {kind}. Strings become ids in the loader, before a metric sees them: kv.data.read(…, "
                f"transform=kv.FeatureEngine([kv.Feature('{name}').hash('farm')]))."
            )
        return entry

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.compute():.6g})"


def check_state(metric: Metric, expected: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
    """Raise unless `received` has the entries of `expected`, each with as many dimensions."""
    if set(expected) != set(received):
        raise ValueError(
            f"A state of {type(metric).__name__} has {', '.join(expected)}; got {', '.join(received)}."
        )


def set_labels(metrics: Mapping[str, Any], loss: Any) -> None:
    """Give metrics without a label the loss's; a ValueError for one where the loss has several."""
    for name, metric in metrics.items():
        if not isinstance(metric, Metric) or not (metric.label is None or metric.label_is_of_loss):
            continue
        labels = label_of_head(loss, metric.output) or ["label"]  # a user's function names none
        if len(labels) > 1:
            raise ValueError(
                f"The metric '{name}' does not say which label it counts, and the loss has several: "
                f"{', '.join(labels)}. Name one of them: {type(metric).__name__}(label='{labels[0]}')."
            )
        [metric.label], metric.label_is_of_loss = labels, True


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


@dataclass(eq=False, repr=False)
class MeanDistance(WeightedMean):
    """The mean of a distance between score and label; scores are numbers unless `logits=True`."""

    logits: bool = field(default=False, kw_only=True)


@dataclass(eq=False, repr=False)
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

    label: str | None = field(default=None, init=False)
    logits: bool = field(default=False, init=False)

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


@dataclass(eq=False, repr=False)
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

    threshold: float = 0.5
    higher_is_better = True

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        right = ((scores >= self.threshold) == (labels >= 0.5)).double()
        return right + 0 * scores  # a score that is NaN is neither right nor wrong


@dataclass(eq=False, repr=False)
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

    top: int = 1
    logits: bool = field(default=False, init=False)
    higher_is_better = True

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"ClassAccuracy expects top of at least 1, got {self.top}.")
        super().__post_init__()

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
