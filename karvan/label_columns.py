"""The label columns that a loss needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from karvan.ragged import OptionalRagged, Ragged, complete, is_text

_KINDS = ("label", "weight")


def label_columns(loss: Any, kind: str = "label") -> list[str]:
    """The columns of labels (or of weights) that a loss or metric names; none for a user's own function."""
    parts = getattr(loss, "losses", None)
    if isinstance(parts, Mapping):
        return list(dict.fromkeys(name for part in parts.values() for name in label_columns(part, kind)))
    name = getattr(loss, kind, None)
    return [name] if isinstance(name, str) else []


def label_of_head(loss: Any, output: str | None) -> list[str]:
    """The label columns that a metric of this output may count: those of its losses, or else of all."""
    parts = getattr(loss, "losses", None)
    if output is not None and isinstance(parts, Mapping):
        parts_ = [part for part in parts.values() if getattr(part, "output", None) == output]
        if names := [name for part in parts_ for name in label_columns(part)]:
            return list(dict.fromkeys(names))
    return label_columns(loss)


def required_labels(
    data: Iterable[Any], loss: Any, metrics: Iterable[Any] = ()
) -> AbstractContextManager[None]:
    """Within it, data that supports it, such as a `Loader`, raises where a label or weight is missing."""
    parts = [loss, *metrics]
    labels, weights = ([name for part in parts for name in label_columns(part, kind)] for kind in _KINDS)
    return required_values(data, labels, weights)


@contextmanager
def required_values(
    data: Iterable[Any], labels: Sequence[str], weights: Sequence[str] = ()
) -> Iterator[None]:
    """Within it, data that supports it raises where one of these columns has no value."""
    require_values = getattr(data, "require_values", None)
    if require_values is None:
        yield
        return
    with require_values(labels, weights):
        yield


def refuse_missing(name: str, entry: Any) -> Any:
    """A column without missing values; a ValueError if it lacks those of some samples."""
    entry = complete(entry)
    if isinstance(entry, OptionalRagged):
        missing = entry.rows - entry.values.shape[0]
        raise ValueError(
            f"Column '{name}' has no value for {missing} of {entry.rows} samples. Remove such records from "
            "the data, or declare a value for null: kv.data.Fixed(…, default=0) as it is read, or "
            "Feature(…).fill_missing(0) behind the step that makes it a number, such as a hash."
        )
    return entry


def check_weights(weights: Tensor, column: str | None) -> None:
    """Raise a ValueError for sample weights that are negative, NaN or infinite."""
    if not weights.numel() or weights.dtype is torch.bool:
        return
    low, high = (float(bound) for bound in torch.aminmax(weights.detach()))
    if low >= 0 and high < torch.inf:
        return
    wrong = weights[~((weights >= 0) & (weights < torch.inf))]
    name = "Sample weights" if column is None else f"Column '{column}' of sample weights"
    raise ValueError(
        f"{name} must be finite and not negative, got {wrong.reshape(-1)[0].item():g} in {wrong.numel()} of "
        f"{weights.numel()} samples. A weight of 0 leaves a sample out."
    )


def one_each(name: str, entry: Any) -> Tensor:
    """The values of a column with one value per sample; a ValueError or TypeError for any other column."""
    entry = refuse_missing(name, entry)
    if isinstance(entry, Ragged) and entry.offsets is None:
        return entry.values
    if not isinstance(entry, Tensor):
        raise TypeError(
            f"Column '{name}' must be a tensor with one value per sample, but is "
            + (
                f"text. A feature in read(…, transform=) makes numbers of words, such as 0 and 1 by "
                f"kv.Feature('{name}').vocabulary(['no', 'yes'])."
                if is_text(entry)
                else f"{type(entry).__name__}."
            )
        )
    return entry
