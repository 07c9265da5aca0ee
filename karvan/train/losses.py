"""Losses: functions of a model's output and its batch, of one head or of several.

A loss names the column of labels; `kv.losses.BinaryCrossEntropy(label="click")`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from karvan.argument_checks import listed, publish
from karvan.label_columns import check_weights, label_columns, one_each
from karvan.ragged import NestedRagged, Padded, Ragged
from karvan.train.types import AnyBatch, Losses, Output

# Labels that are invalid for a loss: NaN, infinite, or out of range.

_log = logging.getLogger("karvan.train")

_MOST_WITHOUT_WEIGHT = 10_000  # samples

Check = Callable[[AnyBatch], None]


def no_check(batch: AnyBatch) -> None:
    """Checks nothing, for a loss that does not say which labels it allows."""


def check_of(loss: Any) -> Check:
    """The `check_labels(batch)` of a loss, if it has one."""
    check: Check = getattr(loss, "check_labels", no_check)
    return check


class SampleChecks:
    """Checks the labels and weights of batches before they are used, and that some sample has a weight.

    loss, metrics: those that name columns. A loss of masked samples may have batches without any weight, but
    training on nothing else would be none.
    """

    def __init__(self, loss: Any, metrics: Iterable[Any] = ()) -> None:
        self._check_labels = check_of(loss)
        self._of_loss = set(label_columns(loss, "weight"))
        self._columns = self._of_loss.union(*(label_columns(metric, "weight") for metric in metrics))
        self._samples = 0
        self._weighted: set[str] = set()  # columns with a weight above 0

    def __call__(self, batch: AnyBatch) -> None:
        """Raise if labels or weights of a batch are invalid."""
        self._check_labels(batch)
        for name in self._columns:
            weights = _numbers_of(batch, name)
            if weights is not None:
                check_weights(weights, name)
                self._samples += weights.numel() * (name not in self._weighted)
                if name not in self._weighted and bool((weights > 0).any()):
                    self._weighted.add(name)
        if self._samples > _MOST_WITHOUT_WEIGHT:
            self.require_weight()

    def require_weight(self) -> None:
        """Raise a ValueError if no sample so far had a weight in the loss; warn of other columns."""
        missing = self._columns - self._weighted if self._samples else set()
        if missing and self._of_loss and self._of_loss <= missing:
            raise ValueError(
                f"{_weightless(missing)}, so nothing is trained: expected weights above 0 for samples that "
                "count."
            )
        self.warn_without_weight()

    def warn_without_weight(self) -> None:
        """Log a warning if a column had no weight above 0 so far."""
        if self._samples and (missing := self._columns - self._weighted):
            _log.warning("%s: losses and metrics with these weights mean nothing.", _weightless(missing))
        self._samples = 0


def _weightless(columns: Iterable[str]) -> str:
    names = ", ".join(f"'{name}'" for name in sorted(columns))
    return f"Column {names} of sample weights is 0 for all samples so far"


def check_column(
    loss: str,
    batch: AnyBatch,
    label: str,
    weight: str | None,
    allowed: tuple[float, float] | None,
    advice: str = "make them 0 or 1 before (as in rating > 3), or use MeanSquaredError for numbers",
) -> None:
    """Raise a ValueError if a label is not finite, or is not in the allowed range and its weight is not 0.

    Columns that are missing, or of the wrong shape, are reported by the loss itself.
    """
    labels = _numbers_of(batch, label)
    if labels is None or labels.dtype is torch.bool:
        return
    low, high = (float(bound) for bound in torch.aminmax(labels.detach()))
    lowest, highest = (-torch.inf, torch.inf) if allowed is None else allowed
    if lowest <= low and high <= highest and max(abs(low), abs(high)) < torch.inf:
        return
    finite = torch.isfinite(labels)
    if not bool(finite.all()):
        count, kind = int((~finite).sum()), "NaN" if bool(labels.isnan().any()) else "infinity"
        raise ValueError(
            f"Column '{label}' has {kind} in {count} of {labels.numel()} samples, but {loss} needs a "
            "number as every label: drop such samples, or give the column a default."
        )
    outside = (labels < lowest) | (labels > highest)
    weights = None if weight is None else batch.get(weight)
    if isinstance(weights, Tensor) and weights.numel() == labels.numel():
        outside &= weights.reshape(labels.shape).to(labels.device) != 0
    if not (count := int(outside.sum())):
        return
    raise ValueError(
        f"Column '{label}' has {count} of {labels.numel()} labels outside of {lowest:g} to {highest:g}, such "
        f"as {labels[outside][0].item():g}, but {loss} needs labels in this range: {advice}."
    )


def _numbers_of(batch: AnyBatch, name: str) -> Tensor | None:
    """A column of one number for each sample, if there are any."""
    entry = batch.get(name) if isinstance(batch, Mapping) else None
    if isinstance(entry, Ragged) and entry.offsets is None:
        entry = entry.values
    return entry if isinstance(entry, Tensor) and entry.numel() else None


def nonfinite_text(batches: Iterable[Any]) -> str:
    """Which columns of these batches have NaN or infinite values, as sentences; nothing if none has."""
    problems: dict[str, str] = {}
    for batch in batches:
        for name, entry in batch.items() if isinstance(batch, Mapping) else ():
            if name not in problems and (text := _column_text(name, entry)):
                problems[name] = text
    if not problems:
        return ""
    return (
        f" {' '.join(problems.values())} Fill missing values (kv.Feature(…).fill_missing(0)), or leave such "
        "samples out."
    )


def _column_text(name: str, entry: Any) -> str:
    values = entry.values if isinstance(entry, Ragged | NestedRagged | Padded) else entry
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        return ""
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    if not (nans or infinities):
        return ""
    kinds = [text for count, text in ((nans, "NaN"), (infinities, "infinity")) if count]
    if values is entry:
        wrong = (~torch.isfinite(values)).reshape(len(values), -1).any(1)
        return f"Column '{name}' has {' and '.join(kinds)} in {int(wrong.sum())} of {len(wrong)} samples."
    return f"Column '{name}' has {' and '.join(kinds)} in {nans + infinities} of {values.numel()} values."


__all__ = ["BinaryCrossEntropy", "CrossEntropy", "MeanSquaredError", "Sum", "ColumnLoss"]

_STEPS_OF_PROBABILITIES = 100
_SHAPES = (
    "Squeeze",
    "View",
    "UnsafeView",
    "Reshape",
    "Select",
    "Slice",
    "Unbind",
    "Split",
    "ToCopy",
    "Clone",
)


@dataclass(frozen=True)
class ColumnLoss(ABC):
    """The base class of losses: the mean of the losses of a batch's samples.

    Args:
        label: The column of labels in the batch.
        output: The name of the head, if the model has several.
        weight: A column of weights in the batch. The mean is then weighted, so a sample of weight 0 does not
            count.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class AbsoluteError(kv.losses.ColumnLoss):
        ...     def each(self, scores, labels):
        ...         return (scores - labels).abs()
        >>> AbsoluteError()(torch.tensor([1.0, 2.0]), {"label": torch.zeros(2)})
        tensor(1.5000)
    """

    label: str = "label"
    output: str | None = None
    weight: str | None = None

    def __call__(self, output: Output, batch: AnyBatch) -> Tensor:
        """The mean, computed in float32 for any precision of the output."""
        scores = _head(output, self.output).float()
        labels = self._labels_beside(scores, batch)
        if self.weight is None:
            return self.mean(scores, labels)
        weights = _column(batch, self.weight, labels)
        if weights.is_cpu:  # those on a GPU were checked before they were copied: a check would wait for it
            check_weights(weights, self.weight)
        # 0 for a batch without any weight, and not 0 / 0.
        least = torch.finfo(torch.float32).tiny
        return (self.each(scores, labels) * weights).sum() / weights.sum().clamp(min=least)

    def _labels_beside(self, scores: Tensor, batch: AnyBatch, dtype: torch.dtype = torch.float32) -> Tensor:
        """The labels, in the shape of these scores."""
        if self.label in batch:
            return _column(batch, self.label, scores, dtype)
        likely = [name for name in batch if _is_binary(batch[name])] if self.label_range == (0.0, 1.0) else []
        label, kind = likely[0] if len(likely) == 1 else "…", type(self).__name__
        among = f" Those of 0 and 1 are: {', '.join(likely)}." if len(likely) > 1 else ""
        raise KeyError(
            f"There is no column '{self.label}' in the batch, which has: {listed(self.label, batch)}{among} "
            f"Name the column of the labels: {kind}(label='{label}'), or in a config, loss: {{name: {kind}, "
            f"label: {label}}}."
        )

    label_range: ClassVar[tuple[float, float] | None] = None  # allowed labels, if limited

    def check_labels(self, batch: AnyBatch) -> None:
        """Check the labels of a batch.

        A Trainer calls it before each step.

        Args:
            batch: The batch.

        Raises:
            ValueError: Labels are not finite, or out of range.
        """
        check_column(type(self).__name__, batch, self.label, self.weight, self.label_range)

    def mean(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean of the samples' losses.

        Args:
            scores: The scores.
            labels: The labels.

        Returns:
            The mean, a tensor.
        """
        return self.each(scores, labels).mean()

    @abstractmethod
    def each(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sample.

        Args:
            scores: The scores.
            labels: The labels.

        Returns:
            A loss for each sample.
        """


@dataclass(frozen=True)
class BinaryCrossEntropy(ColumnLoss):
    """The binary cross entropy of logits and labels from 0 to 1.

    Args:
        label: The column of labels in the batch.
        output: The name of the head, if the model has several.
        weight: A column of weights in the batch.

    Example:
        >>> loss = kv.losses.BinaryCrossEntropy(label="click")
        >>> loss(torch.zeros(2), {"click": torch.tensor([1.0, 0.0])})
        tensor(0.6931)
    """

    label_range = (0.0, 1.0)

    def mean(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean of the samples' losses."""
        # Torch divides gradients by the number of samples here, but multiplies them by 1 / number where a
        # mean follows: the last bit differs unless that is a power of two. Loops written by hand have the
        # former.
        return functional.binary_cross_entropy_with_logits(scores, labels)

    def each(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sample."""
        return functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")


@dataclass(frozen=True)
class CrossEntropy(ColumnLoss):
    """The cross entropy of a logit for each class and labels that are numbers of classes.

    Logits are (samples, classes); labels are from 0.

    Args:
        label: The column of labels in the batch.
        output: The name of the head, if the model has several.
        weight: A column of weights in the batch.
        classes: The number of classes, if labels shall be checked before each step. On a GPU a label that is
            no class otherwise stops the program.

    Raises:
        ValueError: There are fewer than 2 classes.

    Example:
        >>> loss = kv.losses.CrossEntropy(classes=3)
        >>> loss(torch.zeros(2, 3), {"label": torch.tensor([0, 2])})
        tensor(1.0986)
    """

    classes: int | None = None

    def __post_init__(self) -> None:
        if self.classes is not None and self.classes < 2:
            raise ValueError(f"CrossEntropy expects at least 2 classes, got {self.classes}.")

    def _labels_beside(self, scores: Tensor, batch: AnyBatch, dtype: torch.dtype = torch.int64) -> Tensor:
        if scores.dim() != 2 or (self.classes is not None and scores.shape[1] != self.classes):
            expected = "a logit for each class" if self.classes is None else f"{self.classes} logits"
            raise ValueError(
                f"CrossEntropy expects {expected} and sample, as an output of shape (samples, classes), got "
                f"{list(scores.shape)}."
            )
        labels = super()._labels_beside(scores[:, 0], batch, dtype)
        if (
            labels.is_cpu
            and labels.numel()
            and not 0 <= int(labels.min()) <= int(labels.max()) < scores.shape[1]
        ):
            raise ValueError(
                f"Column '{self.label}' has labels from {int(labels.min())} to {int(labels.max())}, but the "
                f"model gives logits of {scores.shape[1]} classes, 0 to {scores.shape[1] - 1}."
            )
        return labels

    def mean(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean of the samples' losses."""
        return functional.cross_entropy(scores, labels)

    def each(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sample."""
        return functional.cross_entropy(scores, labels, reduction="none")

    def check_labels(self, batch: AnyBatch) -> None:
        """Check that labels are numbers of classes."""
        highest = torch.inf if self.classes is None else self.classes - 1.0
        check_column(
            type(self).__name__,
            batch,
            self.label,
            self.weight,
            (0.0, highest),
            "number classes from 0 on, as kv.Feature(…).vocabulary([…]) does",
        )
        labels = _numbers_of(batch, self.label)
        if labels is not None and labels.is_floating_point() and bool((labels != labels.round()).any()):
            raise ValueError(
                f"Column '{self.label}' has labels such as {labels[labels != labels.round()][0].item():g}, "
                f"but {type(self).__name__} needs whole numbers: the numbers of classes."
            )


@dataclass(frozen=True)
class MeanSquaredError(ColumnLoss):
    """The mean squared error of predictions and labels.

    Args:
        label: The column of labels in the batch.
        output: The name of the head, if the model has several.
        weight: A column of weights in the batch.

    Example:
        >>> loss = kv.losses.MeanSquaredError(label="rating")
        >>> loss(torch.tensor([1.0, 2.0]), {"rating": torch.zeros(2)})
        tensor(2.5000)
    """

    def each(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sample."""
        return functional.mse_loss(scores, labels, reduction="none")


class LogitCheck:
    """Warns of outputs for `BinaryCrossEntropy` that look like probabilities, in the first steps of a fit.

    Such a model learns slowly and to the wrong numbers: the loss applies a sigmoid of its own, so the
    probabilities that it sees are between 0.5 and 0.73.
    """

    def __init__(self) -> None:
        self._steps: dict[str | None, int] = {}  # by output: how often all of it was from 0 to 1

    def see(self, loss: Any, output: Output) -> None:
        """Look at the output for a training batch."""
        for part in loss.losses.values() if isinstance(loss, Sum) else [loss]:
            if not isinstance(part, BinaryCrossEntropy) or self._steps.get(part.output, 0) < 0:
                continue
            scores = _head(output, part.output)
            steps = self._steps.get(part.output, 0) + 1
            ends = _ends_in_sigmoid(scores)
            self._steps[part.output] = steps if ends or _are_probabilities(scores.detach()) else -1
            if ends or self._steps[part.output] == _STEPS_OF_PROBABILITIES:
                self._steps[part.output] = -1
                name = "" if part.output is None else f" '{part.output}'"
                _log.warning(
                    "The model's output%s %s. BinaryCrossEntropy expects logits and applies a sigmoid "
                    "itself: if the model ends in a sigmoid, remove it.",
                    name,
                    "ends in a sigmoid" if ends else f"was from 0 to 1 in all of the first {steps} steps",
                )


def _are_probabilities(scores: Tensor) -> bool:
    if not scores.is_cpu or not scores.numel():  # a GPU would have to be waited for
        return False
    low, high = torch.aminmax(scores)
    return bool((low >= 0) & (high <= 1))


def _ends_in_sigmoid(output: Tensor) -> bool:
    """Whether an output is a sigmoid, perhaps in another shape or type."""
    node: Any = output.grad_fn
    while node is not None and any(node.name().startswith(shape) for shape in _SHAPES):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("Sigmoid")


class Sum:
    """Several losses, each under its name and multiplied by its weight.

    Args:
        losses: The losses by name.
        weights: Their weights by name; by default 1.

    Raises:
        ValueError: There is no loss, or a weight without a loss.

    Example:
        >>> loss = kv.losses.Sum(
        ...     {
        ...         "ctr": kv.losses.BinaryCrossEntropy("click", output="ctr"),
        ...         "cvr": kv.losses.BinaryCrossEntropy("buy", output="cvr"),
        ...     },
        ...     weights={"cvr": 0.5},
        ... )
        >>> output = {"ctr": torch.zeros(2), "cvr": torch.zeros(2)}
        >>> sorted(loss(output, {"click": torch.ones(2), "buy": torch.ones(2)}))
        ['ctr', 'cvr']
    """

    def __init__(self, losses: Mapping[str, Any], weights: Mapping[str, float] | None = None) -> None:
        self.losses = dict(losses)
        self.weights = dict(weights or {})
        if not self.losses:
            raise ValueError("Sum expects at least one loss, got none.")
        if unknown := sorted(set(self.weights) - set(self.losses)):
            names = ", ".join(self.losses)
            raise ValueError(f"There is no loss for the weight of {', '.join(unknown)}; there are: {names}.")

    def check_labels(self, batch: AnyBatch) -> None:
        """Check the labels of each loss that can.

        Args:
            batch: The batch.

        Raises:
            ValueError: Labels are not finite, or out of range.
        """
        for loss in self.losses.values():
            check_of(loss)(batch)

    def __call__(self, output: Output, batch: AnyBatch) -> dict[str, Tensor]:
        """All of the losses; the Trainer trains on their sum and logs each."""
        return {
            name: total(loss(output, batch)) * self.weights.get(name, 1.0)
            for name, loss in self.losses.items()
        }


def total(losses: Losses) -> Tensor:
    """The sum of a loss function's results."""
    if isinstance(losses, Tensor) and losses.dim() == 0:
        return losses
    if not isinstance(losses, Mapping):
        return _scalar("The loss", losses)
    if not losses:
        raise ValueError("A loss must give a tensor or a mapping with at least one, got an empty mapping.")
    first, *others = [_scalar(f"Loss '{name}'", loss) for name, loss in losses.items()]
    return sum(others, start=first)  # one after the other, as a + b would be written by hand


def named(losses: Losses, total: Tensor) -> dict[str, Tensor]:
    """As they are logged: the total as "loss", and each of several as "loss/NAME"."""
    parts = {} if isinstance(losses, Tensor) else {f"loss/{name}": loss for name, loss in losses.items()}
    return {name: loss.detach() for name, loss in {"loss": total, **parts}.items()}


def nothing_of(output: Any) -> Tensor:
    """Zero, with a gradient of zero for everything that all outputs depend on."""
    tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    return sum((tensor.sum() for tensor in tensors), start=torch.zeros(())) * 0


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of an output, also of lists, tuples and mappings in it."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _scalar(what: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(f"{what} must be one number, usually a mean, got shape {tuple(loss.shape)}.")
    return loss.reshape(())


def _head(output: Output, name: str | None) -> Tensor:
    if isinstance(output, Tensor):
        if name is not None:
            raise TypeError(f"The loss expects the output '{name}', but the model gives a single tensor.")
        return output
    if name is None:
        raise TypeError(f"The model gives several outputs; name one by output=: {', '.join(output)}.")
    if name not in output:
        raise KeyError(f"The model gives no output '{name}'; it gives: {listed(name, output)}")
    return output[name]


def _is_binary(column: Any) -> bool:
    """Whether a column has a 0 or a 1 for each sample."""
    if not isinstance(column, Tensor) or not column.numel() or column.numel() != len(column):
        return False
    return bool(((column == 0) | (column == 1)).all())


def _column(batch: AnyBatch, name: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    if name not in batch:
        raise KeyError(f"There is no column '{name}' in the batch, which has: {listed(name, batch)}")
    column = batch[name]
    if not isinstance(column, Tensor):
        column = one_each(name, column)
    column = column.to(like.device, dtype)
    if column.shape != like.shape:
        if column.numel() != like.numel():
            raise ValueError(
                f"Column '{name}' must have the output's shape {list(like.shape)}, got {list(column.shape)}: "
                "the model should give one number for each label."
            )
        column = column.reshape(like.shape)
    return column


# `report`: numbers that a model reports from inside of its forward, such as the share of cut sequences.
#
# A forward of a Trainer collects what is reported in it. The numbers then travel with the losses of their
# batch, through steps, ranks and checkpoints: all of these compute weighted sums. For each name there are two
# entries, the number and a 1. Their ratio is the mean over those batches in which the name was reported, also
# if others have none. No GPU is waited for before the mean is shown.

_NUMBER, _COUNT = "report:", "reports:"
_TAKEN = (
    "loss",
    "samples_per_second",
    "rows",
    "memory",
    "staleness",
    "staleness_max",
    "dense_staleness",
)
_TAKEN_STARTS = ("loss/", "lr/", "rows/", _NUMBER, _COUNT)

Value = TypeVar("Value", Tensor, float)


@dataclass
class Reported:
    """What one forward has reported."""

    _sums: dict[str, Tensor] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Count a number; several of one name become their mean."""
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def entries(self, metrics: Iterable[str]) -> dict[str, Tensor]:
        """The entries that travel with the losses; an error if one has the name of a metric."""
        if self._sums and (both := sorted(set(self._sums) & set(metrics))):
            raise ValueError(
                f"kv.train.report expects names that differ from the Trainer's metrics, got '{both[0]}'."
            )
        totals: dict[str, Tensor] = {}
        for name, values in self._sums.items():
            count = self._counts[name]
            totals[_NUMBER + name] = values if count == 1 else values / count
            totals[_COUNT + name] = torch.ones((), dtype=torch.float64)
        return totals


_current: ContextVar[Reported | None] = ContextVar("karvan_reports", default=None)


@contextmanager
def collecting() -> Iterator[Reported]:
    """The context of a forward whose reports count."""
    reported = Reported()
    token = _current.set(reported)
    try:
        yield reported
    finally:
        _current.reset(token)


def report(name: str, value: Any) -> None:
    """Report a number from inside a model's forward.

    A Trainer shows the mean over the batches since its last report with the losses: in progress, logs and
    TensorBoard. Evaluations have the mean over all samples in their result. With several ranks it is the mean
    of all. Outside of a Trainer's forward it does nothing.

    Args:
        name: A name that no loss or metric has. Several reports of one name in a forward count as their mean.
        value: A number, or a tensor of one element on any device. Nothing waits for it.

    Raises:
        TypeError: `name` is no text, or `value` no number.
        ValueError: The name is taken, or the tensor has several elements.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def forward(self, batch):
        ...         kv.train.report("long", (batch["age"] > 60).float().mean())
        ...         return batch["age"] * 0.1
        >>> output = Net()({"age": torch.tensor([30.0, 70.0])})
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"kv.train.report expects a name, got {name!r}.")
    if name in _TAKEN or name.startswith(_TAKEN_STARTS):
        raise ValueError(f"kv.train.report expects a name that is not used yet, got '{name}'.")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"kv.train.report expects one number for '{name}', such as a mean, got shape "
                f"{tuple(value.shape)}."
            )
    elif isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        value = torch.tensor(float(value), dtype=torch.float64)
    else:
        raise TypeError(f"kv.train.report expects a number for '{name}', got {type(value).__name__}.")
    reported = _current.get()
    if reported is not None:
        # A copy, since it may be a part of something large, or be written to.
        reported.add(name, value.detach().reshape(()).to(torch.float64, copy=True))


def split_reports(entries: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Losses, and the means of what was reported."""
    losses = {name: value for name, value in entries.items() if not name.startswith((_NUMBER, _COUNT))}
    reports = {
        name.removeprefix(_NUMBER): value / entries[_COUNT + name.removeprefix(_NUMBER)]
        for name, value in entries.items()
        if name.startswith(_NUMBER)
    }
    return losses, reports


publish("karvan.train.losses")
