"""`ReadSettings`: how records are read and become batches, in one object that is checked once.

`SourceData` is what all data with such settings has in common, whoever decides which records are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from karvan.argument_checks import check_counts, check_integers, is_integer
from karvan.data.columns.kinds import ColumnKind, kinds_of
from karvan.data.columns.missing_values import ValueChecks
from karvan.data.identity import Identity, files_of, identity_of
from karvan.data.loading.batch_steps import BatchSteps, Decode, Transform
from karvan.data.retry import RETRY_SECONDS, Patience, check_retry_seconds, retrying
from karvan.data.source import Part, Source

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
