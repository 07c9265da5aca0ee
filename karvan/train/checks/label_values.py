"""Labels that are invalid for a loss: NaN, infinite, or out of range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from karvan.ragged import Ragged
from karvan.train.types import AnyBatch

Check = Callable[[AnyBatch], None]


def no_check(batch: AnyBatch) -> None:
    """Checks nothing, for a loss that does not say which labels it allows."""


def check_of(loss: Any) -> Check:
    """The `check_labels(batch)` of a loss, if it has one."""
    found: Check = getattr(loss, "check_labels", no_check)
    return found


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
            f"Column '{label}' has {kind} in {count} of {labels.numel()} samples, but {loss} needs a number "
            "as the label of each: drop such samples, or give the column a default."
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
            f"Column '{label}' has labels such as {labels[broken][0].item():g}, but {loss} needs the numbers "
            "of classes, which are whole."
        )


def _labels_of(batch: AnyBatch, label: str) -> Tensor | None:
    """The labels, if there are any that can be wrong."""
    labels = batch.get(label) if isinstance(batch, Mapping) else None
    if isinstance(labels, Ragged) and labels.offsets is None:
        labels = labels.values
    if not isinstance(labels, Tensor) or labels.dtype is torch.bool or not labels.numel():
        return None
    return labels
