"""`ReadSettings`: how records are read and become batches, in one object that is checked once.

`SourceData` is what all data with such settings has in common, whoever decides which records are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import torch

from karvan.argument_checks import check_counts, check_integers, is_integer
from karvan.data.columns.kinds import ColumnKind, kinds_of
from karvan.data.columns.missing_values import ValueChecks
from karvan.data.identity import Identity, files_of, identity_of
from karvan.data.retry import RETRY_SECONDS, Patience, check_retry_seconds, retrying
from karvan.data.source import Part, Source
from karvan.ragged import Batch, Entry, join_batches, split_batch, with_optional_values

# From records to batches: steps that run once for many batches, and steps that run for each.
#
# A function is *row-wise* if every row of its result depends only on the same row of its argument, and if it
# has an attribute `row_wise` that is true. It is then called with large pieces, from which batches are cut
# afterwards: a call for a hundred thousand rows costs little more than one for a thousand. Functions without
# the attribute are called once for each batch, with exactly its rows.
#
# A column that is known to lack values has the kind for missing values in every batch (`OptionalRagged` or
# `OptionalText`), so that code that expects tensors fails at the first batch, and not hours later.

Rows: TypeAlias = "pa.RecordBatch | Batch"
Decode = Callable[[pa.RecordBatch], Batch]
Transform = Callable[[Batch], Mapping[str, Entry] | tuple[Any, Any]]
"""The result may also be a pair of features and labels, for a Trainer, unless batches go to a GPU at once."""


class BatchSteps:
    """`decode` and then `transform`: row-wise steps run on pieces, the rest on batches."""

    def __init__(self, decode: Decode, transform: Transform | None = None) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform expects a function of a batch, but received {transform!r}.")
        self.decode = decode
        self.transform = transform
        steps: list[Callable[[Any], Any]] = [decode] if transform is None else [decode, transform]
        self.on_pieces = list(takewhile(lambda step: getattr(step, "row_wise", False), steps))
        self.on_batches = steps[len(self.on_pieces) :]
        row_wise = len(self.on_pieces) == 2  # such a transform has outputs in place of the columns
        self._nullable: Sequence[str] = () if row_wise else getattr(decode, "nullable", ())

    def require_fitted(self) -> None:
        """Raise if the transform has not been fitted yet; threads would fail one after the other."""
        getattr(self.transform, "require_fitted", lambda: None)()

    def prepare(self, records: pa.RecordBatch) -> Rows:
        """The row-wise steps."""
        rows_: Rows = _run(self.on_pieces, records)
        if isinstance(rows_, Batch) and len(rows_) and rows_.samples != len(records):
            raise ValueError(
                f"A row-wise step must give a row for each of {len(records)} rows, but gave {rows_.samples}."
            )
        return rows_

    def finish(self, parts: Sequence[Rows]) -> Batch:
        """The batch of these rows; those that have not been prepared are prepared now."""
        rows = join([self.prepare(part) if isinstance(part, pa.RecordBatch) else part for part in parts])
        if self._nullable and isinstance(rows, Batch):
            optional = {name: with_optional_values(rows[name]) for name in self._nullable}
            rows = rows.with_entries({**rows, **optional})
        batch: Batch = _run(self.on_batches, rows)
        return batch


def _run(steps: Iterable[Callable[[Any], Any]], rows: Rows) -> Any:
    value: Any = rows
    for step in steps:
        value = step(value)
        if isinstance(value, dict):
            value = Batch(value)
        if value is None:
            raise TypeError("transform must give a batch, or a pair of features and labels, but gave None.")
    return value


def split(rows: Rows, counts: Sequence[int]) -> Sequence[Rows]:
    """The first `counts[0]` rows, the next `counts[1]` rows, and so on; nothing is copied."""
    if isinstance(rows, Batch):
        return split_batch(rows, counts)
    first, batches = 0, []
    for count in counts:
        batches.append(rows.slice(first, count))
        first += count
    return batches


def join(parts: Sequence[Rows]) -> Rows:
    """All rows, which are either records or entries of batches; a single part is not copied."""
    batches = [part for part in parts if isinstance(part, Batch)]
    if batches:
        return join_batches(batches)
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


T = TypeVar("T")

_INTEGERS = ("batch_size", "shuffle", "seed", "epochs", "steps_per_epoch", "split_records")


@dataclass(frozen=True, eq=False)
class ReadSettings:
    """The arguments of `Loader`, which describes them, without the rank; device: the GPU, if there is one."""

    source: Source
    decode: Decode
    batch_size: int
    shuffle: int = 0
    seed: int = 0
    epochs: int | None = 1
    steps_per_epoch: int | None = None
    drop_remainder: bool = False
    workers: int = 2
    prefetch: int = 4
    transform: Transform | None = None
    split_records: int | None = None
    retry_seconds: float = RETRY_SECONDS
    device: torch.device | None = None
    steps: BatchSteps = field(init=False)

    def __post_init__(self) -> None:
        check_counts(1, batch_size=self.batch_size, epochs=self.epochs, steps_per_epoch=self.steps_per_epoch)
        check_counts(1, workers=self.workers, prefetch=self.prefetch, split_records=self.split_records)
        check_integers(seed=self.seed)
        object.__setattr__(self, "steps", BatchSteps(self.decode, self.transform))
        check_retry_seconds(self.retry_seconds)
        meaning = "shuffle is how many records are shuffled at a time, 0 for none"
        if not is_integer(self.shuffle):
            raise TypeError(f"{meaning}, but is {self.shuffle!r}: expected a number, for example 100_000.")
        if self.shuffle < 0:
            raise ValueError(f"{meaning}, but is {self.shuffle}.")
        for name in _INTEGERS:  # numpy's would not go into the JSON of a position
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else int(value))

    def arguments(self) -> dict[str, Any]:
        """The fields by name, as arguments of `Loader`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    def retrying(self, work: Callable[[], T]) -> T:
        """The result of `work`, which is repeated during an outage of the source."""
        return retrying(work, Patience(self.retry_seconds))

    def parts(self) -> list[Part]:
        """The parts of the source."""
        return self.retrying(self.source.parts)

    @property
    def group_records(self) -> int | None:
        """How many records of the source must be decoded together, if it says so."""
        records: int | None = getattr(self.source, "group_records", None)
        return records


class SourceData:
    """The records of a source, which are read with some settings."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._checks = ValueChecks(settings.decode, settings.transform)
        self._identity: Identity | None = None

    @property
    def transform(self) -> Transform | None:
        """The transform of batches; a Trainer saves its state in checkpoints."""
        return self._settings.transform

    @property
    def device(self) -> torch.device:
        """Where batches arrive."""
        return self._settings.device or torch.device("cpu")

    def identity(self) -> Identity:
        """Return what distinguishes this data from other data; the same on all ranks, whatever the order.

        Returns:
            The identity.
        """
        if self._identity is None:
            self._identity = self._settings.retrying(lambda: identity_of(self._settings.source))
        return self._identity

    def column_kinds(self) -> dict[str, ColumnKind]:
        """Return the kinds of the columns that are read.

        Returns:
            The kinds by name.
        """
        return self._settings.retrying(lambda: kinds_of(self._settings.source, self._settings.decode))

    def call_data(self, name: str) -> None:
        """Give the data a name, which is its identity from now on.

        Args:
            name: The name.
        """
        self._identity = Identity.named(name, files_of(self._settings.source))

    def require_values(
        self, labels: Sequence[str], weights: Sequence[str] = ()
    ) -> AbstractContextManager[Any]:
        """Make a missing value of some columns, or NaN, a `DataError` that names file and record.

        A Trainer calls this for the labels and weights of its loss. Columns that the transform creates are
        not checked. It is valid from the next iteration on.

        Args:
            labels: The columns of labels.
            weights: The columns of weights.

        Returns:
            A context that ends it.
        """
        return self._checks.require(labels, weights)
