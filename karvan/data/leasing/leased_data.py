"""What `Trainer.fit` expects of data whose records are leased, whoever reads them.

`SharedData` is read by the trainer itself; that of `karvan/cluster/streams/` by the loaders of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from karvan.data.identity import Identity
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.record_search import SearchResult
from karvan.data.leasing.task_records import TakenRecords
from karvan.ragged import Batch
from karvan.work.task import TaskPlan, WorkSpec


class LeasedBatches(Protocol):
    """The batches of an epoch that one trainer trains."""

    @property
    def idle(self) -> bool:
        """Whether a batch may take long to come, because others work on the last records of the epoch."""

    def __iter__(self) -> Iterator[Any]:
        """All batches, until the epoch is over; can be called once."""

    def hand_over(self) -> list[TakenRecords]:
        """The records of the last batch, for whoever acknowledges them."""

    def suspects(self, error: Exception) -> list[TakenRecords]:
        """The records of which one may be the reason that the next batch raised this error."""

    def stop(self) -> None:
        """End the threads; leases stay."""


class FindsRecords(Protocol):
    """Finds the record that makes a batch raise an error; see `RecordSearch`."""

    def find(
        self, suspects: Sequence[TakenRecords], checks: Sequence[Callable[[Batch], None]] = ()
    ) -> SearchResult:
        """The record among these that raises an error; checks: tried in turn until one finds it."""


@runtime_checkable
class LeasedData(Protocol):
    """Data whose records trainers lease, or deal out by a plan, instead of having fixed shares."""

    @property
    def records(self) -> int:
        """How many records an epoch has."""

    def __iter__(self) -> Iterator[Any]:
        """All batches, for a program that reads them itself; an error if it cannot."""

    def identity(self) -> Identity | None:
        """Distinguishes this data from other data."""

    def spec(self, most_tries: int = 3, skip_bad_records: int = 0) -> WorkSpec:
        """The work, as the master needs to know it."""

    def lease(self, client: WorkClient, epoch: int) -> LeasedBatches:
        """The batches of an epoch that this process leases."""

    def search(self) -> FindsRecords:
        """Finds bad records of leased tasks."""

    def plan(self) -> TaskPlan:
        """The batches of every epoch, each a task, where steps have fixed batches."""

    def planned(
        self, plan: TaskPlan, *, epoch: int, first: int, rank: int, ranks: int, of_step: int
    ) -> LeasedBatches:
        """The batches of an epoch that one of `ranks` trainers computes; see `PlannedLoader`."""
