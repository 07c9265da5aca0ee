"""Data whose records are leased: its interface for `Trainer.fit`, its tasks, plans and batches.

`SharedData` is read by the trainer itself; that of `karvan/cluster/task_stream.py` by the loaders of the job.

Which process gets which records is decided while a job runs, so that processes may come, go and be slow. The
records of a batch are done when whoever has them (`hand_over`) acknowledges them, in the order of the
batches. If a process dies, the records that it has not acknowledged are leased by others.

An error of reading, decoding or the transform is raised to the caller, who acknowledges what is done and then
reports it (`task_records.report`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from karvan.data.columns.missing_values import ValueChecks
from karvan.data.identity import Identity
from karvan.data.loading.loader import Loader
from karvan.data.loading.pipeline import Order, Pipeline, ReadJob, ReadOutcome, ReadPlan
from karvan.data.loading.rank_shares import default_split_records
from karvan.data.loading.settings import ReadSettings, SourceData
from karvan.data.source import Split
from karvan.data.task_records import (
    RecordSearch,
    SearchResult,
    TakenRecords,
    TaskToRead,
    places_of,
    read_job,
)
from karvan.data.work_client import WorkClient
from karvan.ragged import Batch, Entry
from karvan.work.ledger import NoTask
from karvan.work.task import Task, TaskKind, TaskLease, TaskPlan, WorkSpec

_log = logging.getLogger("karvan.data")


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
        """The batches of an epoch that one of `ranks` trainers computes, in order."""


# `LeasedTasks`: the tasks that a process leases, and which of their records its batches contain.
#
# Whoever reads them hands out the records of tasks in order. So the records of the next batch are the first
# ones, of the first tasks, that no batch has contained before; `take` says how far they reach in each task.
#
# A task that is followed by one of another epoch, or by none for now, ends a batch: batches do not span
# epochs, and must not wait for records that others may still be working on. So does every task of an
# evaluation or a prediction: its batches are the same ones whoever computes them.


_Waiting = tuple[TaskLease, Order]  # records of a task, by their places

_LONG = 30.0  # seconds after which a warning says what it waits for
_POLL = 0.1  # seconds between two questions for a task while others work on the last ones of an epoch


class TaskReads(ReadPlan):
    """Reads tasks, wherever they come from; None between two keeps them apart, so that errors have a task.

    seed: of the order of records inside of each task, None for the order of the source.
    """

    def __init__(self, tasks: Iterator[TaskToRead | None], seed: int | None) -> None:
        self.taken: list[TakenRecords] = []
        self._reads = (None if task is None else read_job(task.task, seed, last=task.ends) for task in tasks)

    @property
    def idle(self) -> bool:
        """Whether a batch may take long to come, because others work on the last records of the epoch."""
        return False

    @override
    def jobs(self) -> Iterator[ReadJob | None]:
        return self._reads

    def suspects(self, split: Split | None) -> list[TakenRecords]:
        """The records of which one may have prevented the next batch; split: what could not be read."""
        return []


class LeasedTasks(TaskReads):
    """Iterates over tasks, with None between them: each is read alone, so that errors have a task.

    batch_size: how many records the next batch has at most. tasks_ahead: how many tasks are leased at a time.
    epoch: whose tasks to lease, None for those of all. kind: of tasks. Those of an evaluation end when there
    is none. Otherwise it waits for those that others may return.
    """

    def __init__(
        self,
        client: WorkClient,
        batch_size: int,
        seed: int | None = None,
        *,
        tasks_ahead: int = 2,
        epoch: int | None = None,
        kind: TaskKind = TaskKind.TRAIN,
    ) -> None:
        super().__init__(iter(self), seed)
        self._batch_size = batch_size
        self._epoch = epoch
        self._kind = kind
        self._client = client
        self._tasks_ahead = tasks_ahead
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: deque[_Waiting] = deque()  # those that are in no batch yet
        self._ends: dict[int, bool] = {}  # whether a batch ends with the task, by token of an open one
        self._waits = False  # whether there is no task for now

    def __iter__(self) -> Iterator[TaskToRead | None]:
        before: TaskLease | None = None
        for lease in self._leases():
            if before is not None:
                other = lease is None or lease.task.epoch != before.task.epoch
                ends = other or self._kind is not TaskKind.TRAIN
                yield from self._begin(before, ends)
                yield None
            before = lease

    def _leases(self) -> Iterator[TaskLease | None]:
        """All leases; None where there is none for now, and at the end."""
        waited = 0.0
        while not self._closed.is_set():
            got = self._client.lease((self._kind,), most=self._tasks_ahead, epoch=self._epoch)
            self._waits = not isinstance(got, list)
            if isinstance(got, list):
                if self._closed.is_set():  # meanwhile: nobody would read them
                    self._client.give_back(lease.token for lease in got)
                    return
                yield from got
                waited = 0.0
                continue
            yield None
            if got is NoTask.DONE or self._kind is TaskKind.EVALUATE:
                return
            self._closed.wait(_POLL)
            waited += _POLL
            if self._kind is TaskKind.TRAIN and waited - _POLL < _LONG <= waited:
                _log.warning(
                    "There was no task for %d s: others still work on this epoch. If nobody does, set "
                    "in_order=False in a DataLoader with several workers, or acknowledge batches.",
                    _LONG,
                )

    def _begin(self, lease: TaskLease, ends: bool) -> Iterator[TaskToRead]:
        task = lease.task
        places = places_of(task)
        if not len(places):
            self._client.acknowledge({lease.token: task.records})
            return
        with self._lock:
            self._open.append((lease, places))
            self._ends[lease.token] = ends
        yield TaskToRead(task, ends)

    @property
    @override
    def idle(self) -> bool:
        with self._lock:
            return self._waits and not self._open

    def take(self, records: int) -> list[TakenRecords]:
        """A batch of this many records was handed out: which ones of each task."""
        with self._lock:
            records_, self._open = _first(self._open, records)
            for part in records_:
                if not self._open or self._open[0][0] is not part.lease:
                    del self._ends[part.lease.token]
        return records_

    def left(self) -> list[TaskToRead]:
        """The tasks that are not in batches, in order, each without the records that are."""
        with self._lock:
            return [
                TaskToRead(lease.task._replace(done=int(places[0])), self._ends[lease.token])
                for lease, places in self._open
            ]

    @override
    def handed_out(self, outcome: ReadOutcome) -> None:
        if outcome.batch is not None:
            self.taken = self.take(sum(receipt.records for receipt in outcome.receipts))

    @override
    def suspects(self, split: Split | None) -> list[TakenRecords]:
        with self._lock:
            waiting = self._open.copy()
        if split is None:
            return _first(waiting, self._batch_size)[0]
        for lease, places in waiting:
            task = lease.task
            if task.path == split.path and task.first <= split.first < task.first + task.records:
                return [TakenRecords(lease, places, task.records)]
        return []

    @override
    def close(self) -> None:
        self._closed.set()


def _first(waiting: deque[_Waiting], records: int) -> tuple[list[TakenRecords], deque[_Waiting]]:
    """The first of the records that wait, as far as there are any, and the rest."""
    rest, selected = waiting.copy(), []
    while records and rest:
        lease, places = rest.popleft()
        mine, rest_ = places[:records], places[records:]
        records -= len(mine)
        selected.append(TakenRecords(lease, mine, int(rest_[0]) if len(rest_) else lease.task.records))
        if len(rest_):
            rest.appendleft((lease, rest_))
    return selected, rest


class FixedPlan(TaskReads):
    """The batches of an epoch that one trainer computes where steps have fixed batches, by their numbers.

    Batch i of an epoch is task i of the plan, whoever computes it. The batches of a step are dealt out to the
    trainers in turns, so that each knows its own without asking, and can read them in advance.
    """

    def __init__(
        self, plan: TaskPlan, epoch: int, numbers: Callable[[], Iterator[int]], seed: int | None
    ) -> None:
        super().__init__((TaskToRead(plan.task(epoch, number), ends=True) for number in numbers()), seed)
        self._plan = plan
        self._epoch = epoch
        self._following = numbers()

    @override
    def handed_out(self, outcome: ReadOutcome) -> None:
        if outcome.batch is not None:
            self.taken = self._next()

    @override
    def suspects(self, split: Split | None) -> list[TakenRecords]:
        return self._next()

    def _next(self) -> list[TakenRecords]:
        number = next(self._following)
        return planned_records(number, self._plan.task(self._epoch, number))


def planned_numbers(plan: TaskPlan, *, first: int, rank: int, ranks: int, of_step: int) -> Iterator[int]:
    """The batches of one of `ranks` trainers by their numbers in the epoch."""
    return (number for number in range(first, len(plan)) if number % of_step % ranks == rank)


def planned_records(number: int, task: Task) -> list[TakenRecords]:
    """The records of a batch; its number in the epoch takes the place of the token of a lease."""
    return [TakenRecords(TaskLease(number, "", task), places_of(task), 1)]


class LeasedLoader(Pipeline):
    """Iterates once over the batches of a plan of tasks, which are read from now on."""

    def __init__(self, settings: ReadSettings, plan: TaskReads, checks: ValueChecks | None = None) -> None:
        super().__init__(settings, plan, checks=checks)
        self._tasks = plan

    @property
    def idle(self) -> bool:
        """Whether a batch may take long to come, because others work on the last records of the epoch."""
        return self._tasks.idle

    def hand_over(self) -> list[TakenRecords]:
        """The records of the last batch, for whoever acknowledges them."""
        return self._tasks.taken

    def suspects(self, error: Exception) -> list[TakenRecords]:
        """The records of which one may be the reason that the next batch raised this error."""
        return self._tasks.suspects(self.failed_split(error))

    def stop(self) -> None:
        """End the threads; leases stay."""
        self.close()


class LeasedBatch(dict[str, Entry]):
    """A batch as a dict, which torch's `DataLoader` passes on unchanged."""

    records: dict[int, int]
    """How many records of each leased task are done with it, by token."""

    @classmethod
    def of(cls, batch: Batch, records: dict[int, int]) -> LeasedBatch:
        """A batch and its records."""
        batch_ = cls(batch)
        batch_.records = records
        return batch_


# `SharedData`: data whose records the trainers of a job lease while they train, instead of fixed shares.
#
# `kv.data.read` gives it in the trainers of a job with `sharding: dynamic`. `Trainer.fit` leases its records,
# epoch by epoch, and acknowledges those of every step. Its evaluations lease their records as well, and so
# does `Trainer.predict`. Outside of a fit an evaluation divides it by ranks, as ever. In a loader of such a
# job, `serve` reads the tasks that trainers have leased.

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
        return self._leased(LeasedTasks(client, self.batch_size, self.seed, epoch=epoch))

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
        return self._leased(LeasedTasks(client, self.batch_size, tasks_ahead=1, kind=TaskKind.EVALUATE))

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
        kind = TaskKind.PREDICT
        return self._leased(LeasedTasks(client, self.batch_size, tasks_ahead=1, epoch=number, kind=kind))

    def _leased(self, plan: TaskReads) -> LeasedLoader:
        return LeasedLoader(self._settings, plan, self._checks)

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
        return self._leased(FixedPlan(plan, epoch, numbers, self.seed))

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
