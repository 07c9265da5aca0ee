"""Data whose records are leased: its interface for `Trainer.fit`, its tasks, plans and batches.

`SharedData` is read by the trainer itself; that of `karvan/cluster/task_stream.py` by the loaders of the job.

Which process gets which records is decided while a job runs, so that processes may come, go and be slow. The
records of a batch are done when whoever has them (`hand_over`) acknowledges them, in the order of the
batches. If a process dies, the records that it has not acknowledged are leased by others.

An error of reading, decoding or the transform is raised to the caller, who acknowledges what is done and then
reports it (`dataset.py`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from karvan.data.columns.missing_values import ValueChecks
from karvan.data.identity import Identity
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.record_search import SearchResult
from karvan.data.leasing.task_records import TakenRecords, TaskReads, TaskToRead, places_of
from karvan.data.loading.pipeline import Pipeline, ReadOutcome
from karvan.data.loading.read_jobs import Order
from karvan.data.loading.settings import ReadSettings
from karvan.data.source import Split
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


class LeasedTasks:
    """Iterates over tasks, with None between them: each is read alone, so that errors have a task.

    tasks_ahead: how many tasks are leased at a time. epoch: whose tasks to lease, None for those of all.
    kind: of tasks. Those of an evaluation end when there is none. Otherwise it waits for those that others
    may return.
    """

    def __init__(
        self,
        client: WorkClient,
        *,
        tasks_ahead: int = 2,
        epoch: int | None = None,
        kind: TaskKind = TaskKind.TRAIN,
    ) -> None:
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
    def idle(self) -> bool:
        """Whether all records that were leased are in batches, and there is no task for now."""
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

    def suspects(self, split: Split | None, records: int) -> list[TakenRecords]:
        """Those of a split that could not be read; of an error elsewhere, the next so many records."""
        with self._lock:
            waiting = self._open.copy()
        if split is None:
            return _first(waiting, records)[0]
        for lease, places in waiting:
            task = lease.task
            if task.path == split.path and task.first <= split.first < task.first + task.records:
                return [TakenRecords(lease, places, task.records)]
        return []

    def close(self) -> None:
        """Lease no more."""
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


# The plans of a `LeasedLoader`: which tasks it reads, and which of their records the last batch has.


class LeasePlan(TaskReads):
    """Tasks that are leased, until there are none."""

    def __init__(self, tasks: LeasedTasks, batch_size: int, seed: int | None) -> None:
        super().__init__(iter(tasks), seed)
        self._tasks = tasks
        self._batch_size = batch_size
        self.taken: list[TakenRecords] = []

    @property
    def idle(self) -> bool:
        """Whether all records that were leased are in batches, and there is no task for now."""
        return self._tasks.idle

    @override
    def handed_out(self, outcome: ReadOutcome) -> None:
        if outcome.batch is not None:
            self.taken = self._tasks.take(sum(receipt.records for receipt in outcome.receipts))

    def suspects(self, split: Split | None) -> list[TakenRecords]:
        """The records of which one may have prevented the next batch; split: what could not be read."""
        return self._tasks.suspects(split, self._batch_size)

    @override
    def close(self) -> None:
        self._tasks.close()


class FixedPlan(TaskReads):
    """The batches of an epoch that one trainer computes where steps have fixed batches, by their numbers.

    Batch i of an epoch is task i of the plan, whoever computes it. The batches of a step are dealt out to the
    trainers in turns, so that each knows its own without asking, and can read them in advance.
    """

    idle = False  # there is always a next batch, until the epoch is over

    def __init__(
        self, plan: TaskPlan, epoch: int, numbers: Callable[[], Iterator[int]], seed: int | None
    ) -> None:
        super().__init__((TaskToRead(plan.task(epoch, number), ends=True) for number in numbers()), seed)
        self._plan = plan
        self._epoch = epoch
        self._following = numbers()
        self.taken: list[TakenRecords] = []

    @override
    def handed_out(self, outcome: ReadOutcome) -> None:
        if outcome.batch is not None:
            self.taken = self._next()

    def suspects(self, split: Split | None) -> list[TakenRecords]:
        """The records of the next batch."""
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


class LeasedLoader(LeasedBatches):
    """Iterates once over the batches of a plan of tasks, which are read from now on."""

    def __init__(
        self, settings: ReadSettings, plan: LeasePlan | FixedPlan, checks: ValueChecks | None = None
    ) -> None:
        self._plan = plan
        self._pipeline = Pipeline(settings, plan, checks=checks)

    @override
    def __iter__(self) -> Iterator[Batch]:
        return iter(self._pipeline)

    @property
    @override
    def idle(self) -> bool:
        return self._plan.idle

    @override
    def hand_over(self) -> list[TakenRecords]:
        return self._plan.taken

    @override
    def suspects(self, error: Exception) -> list[TakenRecords]:
        return self._plan.suspects(self._pipeline.failed_split(error))

    @override
    def stop(self) -> None:
        self._pipeline.close()


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
