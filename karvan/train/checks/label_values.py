"""Labels that are invalid for a loss: NaN, infinite, or out of range."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from karvan.label_columns import check_weights, label_columns
from karvan.ragged import Ragged
from karvan.train.types import AnyBatch

_log = logging.getLogger("karvan.train")

_MOST_WITHOUT_WEIGHT = 10_000  # samples

Check = Callable[[AnyBatch], None]


def no_check(batch: AnyBatch) -> None:
    """Checks nothing, for a loss that does not say which labels it allows."""


def check_of(loss: Any) -> Check:
    """The `check_labels(batch)` of a loss, if it has one."""
    found: Check = getattr(loss, "check_labels", no_check)
    return found


class SampleChecks:
    """Checks the labels and weights of batches before they are used, and that some sample has a weight.

    loss, metrics: those that name columns. A loss of masked samples may have batches without any weight, but
    training on nothing else would be none.
    """

    def __init__(self, loss: Any, metrics: Iterable[Any] = ()) -> None:
        self._check_labels = check_of(loss)
        self._of_loss = set(label_columns(loss, "weight"))
        self._columns = self._of_loss.union(*(label_columns(each, "weight") for each in metrics))
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
    labels = _labels_of(batch, label)
    if labels is None:
        return
    low, high = (float(each) for each in torch.aminmax(labels.detach()))
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


def check_whole(loss: str, batch: AnyBatch, label: str) -> None:
    """Raise a ValueError if a label is no whole number."""
    labels = _labels_of(batch, label)
    if labels is None or not labels.is_floating_point():
        return
    broken = labels != labels.round()
    if bool(broken.any()):
        raise ValueError(
            f"Column '{label}' has labels such as {labels[broken][0].item():g}, but {loss} needs whole "
            "numbers: the numbers of classes."
        )


def _labels_of(batch: AnyBatch, label: str) -> Tensor | None:
    """The labels, if there are any that can be wrong."""
    labels = _numbers_of(batch, label)
    return None if labels is None or labels.dtype is torch.bool else labels


def _numbers_of(batch: AnyBatch, name: str) -> Tensor | None:
    """A column of one number for each sample, if there are any."""
    entry = batch.get(name) if isinstance(batch, Mapping) else None
    if isinstance(entry, Ragged) and entry.offsets is None:
        entry = entry.values
    return entry if isinstance(entry, Tensor) and entry.numel() else None
