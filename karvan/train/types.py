"""Types of models' outputs, losses, metrics and data, as a Trainer uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from karvan.ragged import Batch, NestedRagged, Ragged

# `Pair`: a batch that is features and labels, as many data sets of torch give it, rather than named columns.
#
# `(features, labels)` unpacks like the tuple that it is. To losses, metrics and checks it is a mapping, too:
# of the columns "features" and "label", or of the features' and the labels' own names where they have some.
# The model gets the features alone.

FEATURES = "features"
LABEL = "label"


class Pair(tuple[Any, Any]):
    """Features and labels of the same samples; labels are None where there are none."""

    __slots__ = ()

    def __new__(cls, features: Any, labels: Any) -> Pair:
        """A pair of tensors or ragged rows, or of mappings of names to these."""
        return super().__new__(cls, (features, labels))

    def __getnewargs__(self) -> tuple[Any, Any]:
        return self.features, self.labels

    @property
    def features(self) -> Any:
        """What the model gets."""
        return tuple.__getitem__(self, 0)

    @property
    def labels(self) -> Any:
        """The labels."""
        return tuple.__getitem__(self, 1)

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return next(map(_rows, self.values()), 0)

    def columns(self) -> dict[str, Any]:
        """Features and labels by name."""
        return {**_named(FEATURES, self.features), **_named(LABEL, self.labels)}

    def with_columns(self, columns: Mapping[str, Any]) -> Pair:
        """The same pair with other tensors under its names."""
        return Pair(
            _renewed(FEATURES, self.features, columns),
            _renewed(LABEL, self.labels, columns),
        )

    def keys(self) -> Any:
        """The names."""
        return self.columns().keys()

    def values(self) -> Any:
        """The tensors."""
        return self.columns().values()

    def items(self) -> Any:
        """Names and tensors."""
        return self.columns().items()

    def get(self, name: str, default: Any = None) -> Any:
        """The column of that name, if there is one."""
        return self.columns().get(name, default)

    def __getitem__(self, key: Any) -> Any:
        """The column of that name; a number gives the features or the labels."""
        return self.columns()[key] if isinstance(key, str) else tuple.__getitem__(self, key)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.columns()

    def __repr__(self) -> str:
        return f"Pair({', '.join(self.columns())})"


Mapping.register(Pair)


def as_batch(value: Any) -> Any:
    """A pair of features and labels, or features alone, as a `Pair`; anything else as it is."""
    if isinstance(value, Tensor) and value.dim():
        return Pair(value, None)
    if not isinstance(value, tuple | list) or isinstance(value, Pair) or hasattr(value, "_fields"):
        return value
    if len(value) == 1 and _is_part(value[0]):
        return _checked(Pair(value[0], None))
    if len(value) == 2 and all(map(_is_part, value)):
        return _checked(Pair(*value))
    return value


def model_input(batch: Any) -> Any:
    """What the model gets of a batch: all of it, or the features of a pair."""
    return batch.features if isinstance(batch, Pair) else batch


def _is_part(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.dim() > 0) or (
        isinstance(value, Mapping | Ragged | NestedRagged) and not isinstance(value, Pair)
    )


def _checked(pair: Pair) -> Pair:
    named = [_named(FEATURES, pair.features), _named(LABEL, pair.labels)]
    if both := sorted(set(named[0]) & set(named[1])):
        raise ValueError(
            f"A pair of features and labels expects different names in both, got '{both[0]}' twice."
        )
    counts = {name: _rows(entry) for part in named for name, entry in part.items()}
    first = next(iter(counts), "")
    for name, count in counts.items():
        if count != counts[first]:
            raise ValueError(
                f"A pair of features and labels expects equally many of each, got {counts[first]} in "
                f"'{first}' and {count} in '{name}'."
            )
    return pair


def _rows(entry: Any) -> int:
    return (
        int(entry.shape[0]) if isinstance(entry, Tensor) and entry.dim() else int(getattr(entry, "rows", 0))
    )


def _named(name: str, part: Any) -> dict[str, Any]:
    if part is None:
        return {}
    return dict(part) if isinstance(part, Mapping) else {name: part}


def _renewed(name: str, part: Any, columns: Mapping[str, Any]) -> Any:
    if part is None:
        return None
    if not isinstance(part, Mapping):
        return columns[name]
    renewed = {column: columns[column] for column in part}
    return Batch(renewed) if isinstance(part, Batch) else renewed


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
        prediction = Prediction(*self)
        prediction.records = records
        return prediction


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
