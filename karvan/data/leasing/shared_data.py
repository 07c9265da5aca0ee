"""`SharedData`: data whose records the trainers of a job lease while they train, instead of fixed shares.

`kv.data.read` gives it in the trainers of a job with `sharding: dynamic`. `Trainer.fit` leases its records,
epoch by epoch, and acknowledges those of every step. Its evaluations lease their records as well, and so does
`Trainer.predict`. Outside of a fit an evaluation divides it by ranks, as ever. In a loader of such a job,
`serve` reads the tasks that trainers have leased.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.leased_data import FixedPlan, LeasedLoader, LeasedTasks, LeasePlan, planned_numbers
from karvan.data.leasing.record_search import RecordSearch
from karvan.data.leasing.task_records import TaskReads, TaskToRead
from karvan.data.loading.loader import Loader
from karvan.data.loading.pipeline import Pipeline
from karvan.data.loading.settings import ReadSettings, SourceData
from karvan.data.loading.shuffle import default_split_records
from karvan.ragged import Batch
from karvan.work.task import TaskKind, TaskPlan, WorkSpec

# Tasks of an epoch, unless they would be smaller than a batch. With a few large ones, some trainers have
# nothing to do while others work on the last of them. If tasks come in a random order, each decodes its whole
# group of records (a row group of Parquet), so there are fewer.
_TASKS = 256
_SHUFFLED_TASKS = 64
_MOST_OPEN = 1024  # tasks of an evaluation or a prediction, about: the master stores them all


class SharedData(SourceData):
    """Records that trainers lease; `kv.data.read` makes it in a job with `sharding: dynamic`.

    `Trainer.fit` leases the records; programs need no method of it.

    Args:
        settings: How the records are read: `shuffle` mixes the tasks, and the records inside of each, and
            `split_records` is how many are leased at once.

    Example:
        >>> def job(trainer):  # in a job with `sharding: dynamic`
        ...     data = kv.data.read("clicks/*.parquet", batch_size=4096)
        ...     trainer.fit(data, epochs=3)
    """

    def __init__(self, settings: ReadSettings) -> None:
        super().__init__(settings)
        self.batch_size = settings.batch_size
        self.seed = settings.seed if settings.shuffle else None  # of tasks, and of the records inside of each
        parts = settings.parts()
        self.parts = tuple((part.path, part.records) for part in parts)
        group = settings.group_records
        usual = default_split_records(parts, 0, group)
        self.records_per_task = settings.split_records or (
            _shuffled_task_records(group, self.records, self.batch_size)
            if group and self.seed is not None
            else min(usual, max(self.batch_size, self.records // _TASKS))
        )

    @property
    def records(self) -> int:
        """How many records an epoch has."""
        return sum(records for _, records in self.parts)

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
        return self._leased(LeasedTasks(client, epoch=epoch), self.seed)

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
        return self._leased(LeasedTasks(client, tasks_ahead=1, kind=TaskKind.EVALUATE))

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
        return self._leased(LeasedTasks(client, tasks_ahead=1, epoch=number, kind=TaskKind.PREDICT))

    def _leased(self, tasks: LeasedTasks, seed: int | None = None) -> LeasedLoader:
        return LeasedLoader(self._settings, LeasePlan(tasks, self.batch_size, seed), self._checks)

    @property
    def _whole_batches(self) -> int:
        """How many records a task of an evaluation or a prediction has."""
        records = max(self.records_per_task, -(-self.records // _MOST_OPEN))
        return -(-records // self.batch_size) * self.batch_size

    def search(self, *, in_order: bool = False) -> RecordSearch:
        """Return what finds bad records of leased tasks.

        Args:
            in_order: Whether tasks are read in the order of the source.

        Returns:
            The search.
        """
        return RecordSearch(self._settings, None if in_order else self.seed, self._checks)

    def plan(self) -> TaskPlan:
        """Return the batches of every epoch, each a task, where steps have fixed batches.

        Returns:
            The tasks.
        """
        return TaskPlan(self.parts, self.batch_size, seed=self.seed)

    def planned(
        self, plan: TaskPlan, *, epoch: int, first: int, rank: int, ranks: int, of_step: int
    ) -> LeasedLoader:
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
        numbers = partial(planned_numbers, plan, first=first, rank=rank, ranks=ranks, of_step=of_step)
        return LeasedLoader(self._settings, FixedPlan(plan, epoch, numbers, self.seed), self._checks)

    def read_tasks(self, tasks: Iterator[TaskToRead | None]) -> Pipeline:
        """Read the batches of tasks, whoever has leased them.

        Args:
            tasks: The tasks.

        Returns:
            An iterable of batches.
        """
        return Pipeline(self._settings, TaskReads(tasks, self.seed), checks=self._checks)

    def share(self, rank: int, ranks: int) -> Loader:
        """Return a fixed share of the records, for an evaluation.

        Args:
            rank: Which share.
            ranks: How many shares there are.

        Returns:
            A loader.
        """
        return Loader(**self._settings.arguments(), rank=rank, world_size=ranks)

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
    return next((size for size in equal if size >= batch_size), wanted)
