"""The columns of the data that a loss cannot do without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from karvan.ragged import OptionalRagged, Ragged


def label_columns(loss: Any) -> list[str]:
    """The columns of labels and weights that a loss or metric names; none for a function of your own."""
    parts = getattr(loss, "losses", None)
    if isinstance(parts, Mapping):
        return list(dict.fromkeys(name for part in parts.values() for name in label_columns(part)))
    names = [getattr(loss, part, None) for part in ("label", "weight")]
    return [name for name in names if isinstance(name, str)]


def require_labels(data: Iterable[Any], loss: Any, metrics: Iterable[Any] = ()) -> None:
    """Ask data that can do so, such as a `Loader`, to raise where a label or weight is missing."""
    require_columns(data, [name for part in (loss, *metrics) for name in label_columns(part)])


def require_columns(data: Iterable[Any], names: list[str]) -> None:
    """Ask data that can do so to raise where one of these columns has no value."""
    ask = getattr(data, "require_values", None)
    if ask is not None:
        ask(names)


def refuse_missing(name: str, entry: Any) -> None:
    """Raise if a column lacks the values of some samples."""
    if isinstance(entry, OptionalRagged):
        missing = entry.rows - entry.values.shape[0]
        raise ValueError(
            f"Column '{name}' has no value for {missing} of {entry.rows} samples. Remove such records from "
            "the data, or declare what stands for null: kv.data.Fixed(…, default=0)."
        )


def one_each(name: str, entry: Any) -> Tensor:
    """The values of a column that has one for each sample; a ValueError or TypeError for any other."""
    refuse_missing(name, entry)
    if isinstance(entry, Ragged) and entry.offsets is None:
        return entry.values
    if not isinstance(entry, Tensor):
        raise TypeError(
            f"Column '{name}' must be a tensor with one value per sample, but is {type(entry).__name__}."
        )
    return entry
