"""Types of models' outputs, losses, metrics and data, as a Trainer uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from karvan.ragged import Batch, NestedRagged, Ragged
from karvan.train.pair import as_batch

Output: TypeAlias = Tensor | Mapping[str, Tensor]
Losses: TypeAlias = Tensor | Mapping[str, Tensor]
AnyBatch: TypeAlias = Mapping[str, Any]
Loss: TypeAlias = Callable[[Any, Any], Losses]


class MetricLike(Protocol):
    """The interface of metrics; those of `karvan.metrics` have it."""

    def update(self, output: Any, batch: Any) -> None:
        """Count a batch."""

    def compute(self) -> float:
        """The value over all batches since the last reset."""

    def reset(self) -> None:
        """Forget all batches."""

    def state(self) -> dict[str, Tensor]:
        """All that has been counted, as tensors."""

    def load_state(self, state: Any) -> None:
        """Restore what `state` gave."""


@runtime_checkable
class Positioned(Protocol):
    """Data that has a position, such as a `Loader`."""

    def state_dict(self) -> dict[str, Any]:
        """The position: after all batches that were handed out."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""


@dataclass(frozen=True)
class PredictedRecords:
    """The records of a batch of predictions, in a job whose trainers lease records.

    If they are predicted again, they are in a batch of the same number.

    Attributes:
        number: The number of the batch among all batches of the data.
        path: The file of the records.
        first: The index of the first record in the file, from 0.
        count: How many records they are.

    Example:
        >>> kv.train.PredictedRecords(number=3, path="a.parquet", first=96, count=32)
        PredictedRecords(number=3, path='a.parquet', first=96, count=32)
    """

    number: int
    path: str
    first: int
    count: int


class _OutputAndColumns(NamedTuple):
    output: Any
    columns: dict[str, Any]


class Prediction(_OutputAndColumns):
    """A model's output for a batch, and columns of the batch beside it.

    The attribute `records` says which records of the data they are, in a job whose trainers lease records;
    otherwise it is None.

    Attributes:
        output: A tensor, or several by name.
        columns: The requested columns of the batch.

    Example:
        >>> prediction = kv.train.Prediction(torch.tensor([0.5]), {"user": [7]})
        >>> output, columns = prediction
        >>> columns
        {'user': [7]}
    """

    records: PredictedRecords | None = None

    def of(self, records: PredictedRecords) -> Prediction:
        """Return the same prediction with its records.

        Args:
            records: The records of the batch.

        Returns:
            A copy.
        """
        made = Prediction(*self)
        made.records = records
        return made


def same(batch: Any) -> Any:
    """Prepares nothing."""
    return batch


def samples_of(batch: Any) -> int:
    """How many samples a batch has."""
    batch = as_batch(batch)
    if isinstance(batch, Batch):
        return batch.samples
    if not isinstance(batch, Mapping):
        raise TypeError(
            "A batch must be a Batch, another mapping of names to tensors, or a pair of tensors (features, "
            f"labels), got {type(batch).__name__}."
        )
    for entry in batch.values():
        if isinstance(entry, Ragged | NestedRagged):
            return entry.rows
        if isinstance(entry, Tensor) and entry.dim():
            return int(entry.shape[0])
    return 0
