"""`SharedData`: data whose records the trainers of a job lease while they train, instead of fixed shares.

`kv.data.read` gives it in the trainers of a job with `sharding: dynamic`. `Trainer.fit` leases its records,
epoch by epoch, and acknowledges those of every step. Its evaluations lease their records as well, and so does
`Trainer.predict`. Outside of a fit an evaluation divides it by ranks, as ever. In a loader of such a job,
`serve` reads the tasks that trainers have leased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from karvan.data.columns.kinds import ColumnKind, kinds_of
from karvan.data.columns.missing_values import ValueChecks
from karvan.data.identity import Identity, files_of, identity_of
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.loader import LeasedLoader, PlannedLoader
from karvan.data.leasing.record_search import RecordSearch
from karvan.data.leasing.task_records import TaskPipeline, TaskToRead
from karvan.data.loading.batch_steps import BatchSteps, Decode, Transform
from karvan.data.loading.loader import Loader
from karvan.data.loading.splits import default_split_records
from karvan.data.retry import Patience, retrying
from karvan.data.source import Source
from karvan.ragged import Batch
from karvan.work.task import TaskKind, TaskPlan, WorkSpec

# Tasks of an epoch, unless they would be smaller than a batch. With a few large ones, some trainers have
# nothing to do while others work on the last of them. If tasks come in a random order, each decodes its whole
# group of records (a row group of Parquet), so there are fewer.
_TASKS = 256
_SHUFFLED_TASKS = 64
_MOST_OPEN = 1024  # tasks of an evaluation or a prediction, about: the master stores them all


class SharedData:
    """Records that trainers lease; `kv.data.read` makes it in a job with `sharding: dynamic`.

    `Trainer.fit` leases the records; programs need no method of it.

    Args:
        source: What to read.
        decode: A function that makes a batch of a record batch.
        batch_size: How many samples make a batch.
        share: A function that makes a Loader for a rank and a number of ranks.
        seed: The seed of the order of tasks, and of the records inside of each; None for the order of the
            source.
        workers: How many threads read.
        prefetch: How many batches are prepared in advance.
        transform: A function of batches.
        records_per_task: How many records are leased at once.
        retry_seconds: How long an unreachable source is tried again.
        device: The GPU that batches go to, if any.

    Example:
        >>> def job(trainer):  # in a job with `sharding: dynamic`
        ...     data = kv.data.read("clicks/*.parquet", batch_size=4096)
        ...     trainer.fit(data, epochs=3)
    """

    def __init__(
        self,
        source: Source,
        decode: Decode,
        batch_size: int,
        share: Callable[[int, int], Loader],
        *,
        seed: int | None,
        workers: int,
        prefetch: int,
        transform: Transform | None,
        records_per_task: int | None,
        retry_seconds: float,
        device: torch.device | None = None,
    ) -> None:
        self._source = source
        self._decode = decode
        self.batch_size = batch_size
        self._share = share
        self.seed = seed
        self._workers = workers
        self._prefetch = prefetch
        self.transform = transform
        self._retry_seconds = retry_seconds
        self._gpu = device
        self._checks = ValueChecks(decode, transform)
        parts = retrying(source.parts, Patience(retry_seconds))
        self.parts = tuple((part.path, part.records) for part in parts)
        group = getattr(source, "group_records", None)
        usual = default_split_records(parts, 0, group)
        self.records_per_task = records_per_task or (
            _shuffled_task_records(group, self.records, batch_size)
            if group and seed is not None
            else min(usual, max(batch_size, self.records // _TASKS))
        )
        self._identity: Identity | None = None

    @property
    def records(self) -> int:
        """How many records an epoch has."""
        return sum(records for _, records in self.parts)

    @property
    def device(self) -> torch.device:
        """Where batches arrive."""
        return torch.device("cpu") if self._gpu is None else self._gpu

    def identity(self) -> Identity:
        """Return what distinguishes this data from other data.

        Returns:
            The identity.
        """
        if self._identity is None:
            self._identity = retrying(lambda: identity_of(self._source), Patience(self._retry_seconds))
        return self._identity

    def column_kinds(self) -> dict[str, ColumnKind]:
        """Return the kinds of the columns that are read.

        Returns:
            The kinds by name.
        """
        return retrying(lambda: kinds_of(self._source, self._decode), Patience(self._retry_seconds))

    def call_data(self, name: str) -> None:
        """Give the data a name, which is its identity from now on.

        Args:
            name: The name.
        """
        self._identity = Identity.named(name, files_of(self._source))

    def require_values(self, labels: Sequence[str], weights: Sequence[str]) -> AbstractContextManager[Any]:
        """Make a missing value of some columns, or NaN, a `DataError`.

        Args:
            labels: The columns of labels.
            weights: The columns of weights.

        Returns:
            A context that ends it.
        """
        return self._checks.require(labels, weights)

    def spec(self, most_tries: int = 3, skip_bad_records: int = 0) -> WorkSpec:
        """Describe the work for the master.

        Args:
            most_tries: How often a task may raise errors before the job fails.
            skip_bad_records: How many records that raise errors may be skipped.

        Returns:
            The work.
        """
        return WorkSpec(
            self.parts,
            self.records_per_task,
            self.seed,
            epochs=None,
            most_tries=most_tries,
            skip_bad_records=skip_bad_records,
        )

    def lease(self, client: WorkClient, epoch: int) -> LeasedLoader:
        """Return the batches of an epoch that this process leases.

        Args:
            client: The master.
            epoch: The number of the epoch.

        Returns:
            An iterable of batches.
        """
        return LeasedLoader(
            client,
            self._checks.over(self._source),
            self._decode,
            self.batch_size,
            seed=self.seed,
            transform=self.transform,
            workers=self._workers,
            prefetch=self._prefetch,
            epoch=epoch,
            retry_seconds=self._retry_seconds,
            device=self._gpu,
        )

    def lease_evaluation(self, client: WorkClient, number: int) -> LeasedLoader:
        """Return the batches that this process leases of an evaluation.

        They end when no task waits.

        Args:
            client: The master.
            number: The number of the evaluation.

        Returns:
            An iterable of batches.
        """
        client.begin_evaluation(number, self.parts, self._whole_batches)
        return self._lease_in_order(client, TaskKind.EVALUATE)

    def prediction_plan(self) -> TaskPlan:
        """Return the tasks of a prediction, each of whole batches.

        Returns:
            The tasks.
        """
        return TaskPlan(self.parts, self._whole_batches)

    def lease_prediction(self, client: WorkClient, number: int) -> LeasedLoader:
        """Return the batches that this process leases of a prediction, until all of it is done.

        Args:
            client: The master.
            number: The number of the prediction.

        Returns:
            An iterable of batches.
        """
        return self._lease_in_order(client, TaskKind.PREDICT, epoch=number)

    @property
    def _whole_batches(self) -> int:
        """How many records a task of an evaluation or a prediction has."""
        records = max(self.records_per_task, -(-self.records // _MOST_OPEN))
        return -(-records // self.batch_size) * self.batch_size

    def _lease_in_order(self, client: WorkClient, kind: TaskKind, epoch: int | None = None) -> LeasedLoader:
        return LeasedLoader(
            client,
            self._checks.over(self._source),
            self._decode,
            self.batch_size,
            transform=self.transform,
            workers=self._workers,
            prefetch=self._prefetch,
            tasks_ahead=1,
            epoch=epoch,
            kind=kind,
            retry_seconds=self._retry_seconds,
            device=self._gpu,
        )

    def search(self, *, in_order: bool = False) -> RecordSearch:
        """Return what finds bad records of leased tasks.

        Args:
            in_order: Whether tasks are read in the order of the source.

        Returns:
            The search.
        """
        steps, seed = BatchSteps(self._decode, self.transform), None if in_order else self.seed
        return RecordSearch(self._checks.over(self._source), steps, seed, self._retry_seconds)

    def plan(self) -> TaskPlan:
        """Return the batches of every epoch, each a task, where steps have fixed batches.

        Returns:
            The tasks.
        """
        return TaskPlan(self.parts, self.batch_size, seed=self.seed)

    def planned(
        self, plan: TaskPlan, *, epoch: int, first: int, rank: int, ranks: int, of_step: int
    ) -> PlannedLoader:
        """Return the batches of an epoch that one of several trainers computes.

        Args:
            plan: The batches of every epoch.
            epoch: The number of the epoch.
            first: The index of the first batch.
            rank: Which trainer this is.
            ranks: How many trainers there are.
            of_step: How many batches a step has.

        Returns:
            An iterable of batches.
        """
        return PlannedLoader(
            plan,
            self._checks.over(self._source),
            self._decode,
            epoch=epoch,
            first=first,
            rank=rank,
            ranks=ranks,
            of_step=of_step,
            seed=self.seed,
            transform=self.transform,
            workers=self._workers,
            prefetch=self._prefetch,
            retry_seconds=self._retry_seconds,
            device=self._gpu,
        )

    def read_tasks(self, tasks: Iterator[TaskToRead | None]) -> TaskPipeline:
        """Read the batches of tasks, whoever has leased them.

        Args:
            tasks: The tasks.

        Returns:
            An iterable of batches.
        """
        return TaskPipeline(
            self._checks.over(self._source),
            self._decode,
            self.batch_size,
            tasks,
            seed=self.seed,
            transform=self.transform,
            workers=self._workers,
            prefetch=self._prefetch,
            retry_seconds=self._retry_seconds,
        )

    def share(self, rank: int, ranks: int) -> Loader:
        """Return a fixed share of the records, for an evaluation.

        Args:
            rank: Which share.
            ranks: How many shares there are.

        Returns:
            A loader.
        """
        return self._share(rank, ranks)

    def __iter__(self) -> Iterator[Batch]:
        """All records, for a program that reads them itself, with the rest of the job not involved."""
        return iter(self.share(0, 1))

    def __bool__(self) -> bool:
        return True


def _shuffled_task_records(group: int, records: int, batch_size: int) -> int:
    """How many records a task has, if tasks come in a random order: a group, or an equal part of one.

    A task that spans two groups would decode both.
    """
    wanted = max(batch_size, records // _SHUFFLED_TASKS)
    fewest = -(-group // wanted)
    if fewest == 1:
        return group
    counts = (*range(fewest, 2 * fewest + 1), *range(fewest - 1, fewest // 2 - 1, -1))
    equal = (group // count for count in counts if group % count == 0)
    return next((each for each in equal if each >= batch_size), wanted)
