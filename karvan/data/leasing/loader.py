"""`LeasedLoader`: batches of the tasks that this process leases, and their acknowledgement.

Which process gets which records is decided while a job runs, so that processes may come, go and be slow. The
records of a batch are done when the caller says so (`acknowledge`), in the order of the batches. If a process
dies, the records that it has not acknowledged are leased by others.

An error of reading, decoding or the transform is raised to the caller, who acknowledges what is done and then
reports it (`dataset.py`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial

import torch

from karvan.activity import activity
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.task_records import TakenRecords, TaskPipeline, TaskToRead, places_of, records_done
from karvan.data.loading.batch_steps import Decode, Transform
from karvan.data.loading.read_jobs import Order
from karvan.data.retry import RETRY_SECONDS
from karvan.data.source import Source, Split
from karvan.ragged import Batch
from karvan.work.ledger import NoTask
from karvan.work.task import Task, TaskKind, TaskLease, TaskPlan

# `LeasedTasks`: the tasks that a process leases, and which of their records its batches contain.
#
# Whoever reads them hands out the records of tasks in order. So the records of the next batch are the first
# ones, of the first tasks, that no batch has contained before; `take` says how far they reach in each task.
#
# A task that is followed by one of another epoch, or by none for now, ends a batch: batches do not span
# epochs, and must not wait for records that others may still be working on. So does every task of an
# evaluation or a prediction: its batches are the same ones whoever computes them.


_log = logging.getLogger("karvan.data")

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
            taken, self._open = _first(self._open, records)
            for each in taken:
                if not self._open or self._open[0][0] is not each.lease:
                    del self._ends[each.lease.token]
        return taken

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
    rest, taken = waiting.copy(), []
    while records and rest:
        lease, places = rest.popleft()
        mine, left = places[:records], places[records:]
        records -= len(mine)
        taken.append(TakenRecords(lease, mine, int(left[0]) if len(left) else lease.task.records))
        if len(left):
            rest.appendleft((lease, left))
    return taken, rest


# `PlannedLoader`: the batches of an epoch that a trainer computes where steps have fixed batches.
#
# Batch i of an epoch is task i of the plan, whoever computes it. The batches of a step are dealt out to the
# trainers in turns, so that each knows its own without asking, and can read them in advance.


class PlannedLoader:
    """Iterates once over the batches of one of `ranks` trainers, from batch number `first` of the epoch on.

    of_step: how many batches a step has. The other arguments are those of `LeasedLoader`.
    """

    idle = False  # there is always a next batch, until the epoch is over

    def __init__(
        self,
        plan: TaskPlan,
        source: Source,
        decode: Decode,
        *,
        epoch: int,
        first: int,
        rank: int,
        ranks: int,
        of_step: int,
        seed: int | None = None,
        transform: Transform | None = None,
        workers: int = 2,
        prefetch: int = 4,
        retry_seconds: float = RETRY_SECONDS,
        device: torch.device | None = None,
    ) -> None:
        self._plan = plan
        self._epoch = epoch
        numbers = partial(planned_numbers, plan, first=first, rank=rank, ranks=ranks, of_step=of_step)
        self._handed_out = numbers()
        self._last = -1
        self._pipeline = TaskPipeline(
            source,
            decode,
            plan.records_per_task,
            (TaskToRead(plan.task(epoch, number), ends=True) for number in numbers()),
            seed=seed,
            transform=transform,
            workers=workers,
            prefetch=prefetch,
            retry_seconds=retry_seconds,
            device=device,
        )

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._pipeline.next().batch) is not None:
            activity.advance()
            self._last = next(self._handed_out)
            yield batch

    def hand_over(self) -> list[TakenRecords]:
        """The records of the last batch; its number in the epoch takes the place of the token of a lease."""
        return self._records(self._last)

    def suspects(self, error: Exception) -> list[TakenRecords]:
        """The tasks whose records may have caused an error."""
        return self._records(next(self._handed_out))

    def _records(self, number: int) -> list[TakenRecords]:
        return planned_records(number, self._plan.task(self._epoch, number))

    def stop(self) -> None:
        """End the threads."""
        self._pipeline.close()


def planned_numbers(plan: TaskPlan, *, first: int, rank: int, ranks: int, of_step: int) -> Iterator[int]:
    """The batches of one of `ranks` trainers by their numbers in the epoch; see `PlannedLoader`."""
    return (number for number in range(first, len(plan)) if number % of_step % ranks == rank)


def planned_records(number: int, task: Task) -> list[TakenRecords]:
    """The records of a batch; its number in the epoch takes the place of the token of a lease."""
    return [TakenRecords(TaskLease(number, "", task), places_of(task), 1)]


class LeasedLoader:
    """Iterates once over the batches of leased tasks, until all tasks of the job, or of the epoch, are done.

    seed: of the order of records inside of each task, None for the order of the source. kind: of tasks, see
    `LeasedTasks`. The other arguments are those of `Loader`.
    """

    def __init__(
        self,
        client: WorkClient,
        source: Source,
        decode: Decode,
        batch_size: int,
        *,
        seed: int | None = None,
        transform: Transform | None = None,
        workers: int = 2,
        prefetch: int = 4,
        tasks_ahead: int = 2,
        epoch: int | None = None,
        kind: TaskKind = TaskKind.TRAIN,
        retry_seconds: float = RETRY_SECONDS,
        device: torch.device | None = None,
    ) -> None:
        self._client = client
        self._tasks = LeasedTasks(client, tasks_ahead=tasks_ahead, epoch=epoch, kind=kind)
        self._batch_size = batch_size
        self._unacknowledged: deque[list[TakenRecords]] = deque()  # of each batch
        self._pipeline = TaskPipeline(
            source,
            decode,
            batch_size,
            iter(self._tasks),
            seed=seed,
            transform=transform,
            workers=workers,
            prefetch=prefetch,
            retry_seconds=retry_seconds,
            device=device,
        )

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._next()) is not None:
            activity.advance()
            yield batch

    def _next(self) -> Batch | None:
        outcome = self._pipeline.next()
        if outcome.batch is not None:
            records = sum(receipt.records for receipt in outcome.receipts)
            self._unacknowledged.append(self._tasks.take(records))
        return outcome.batch

    @property
    def idle(self) -> bool:
        """Whether a batch may take long to come, because others work on the last records of the epoch."""
        return self._tasks.idle

    def acknowledge(self, batches: int = 1) -> list[int]:
        """The records of the oldest batches are done. Returns the tokens of leases that had ended before.

        Those records are with somebody else, because this process was taken for dead.
        """
        done: dict[int, int] = {}
        for _ in range(batches):
            done |= records_done(self._unacknowledged.popleft())
        return self._client.acknowledge(done)

    def hand_over(self) -> list[TakenRecords]:
        """The records of the last batch, for somebody else who will acknowledge them."""
        return self._unacknowledged.pop()

    def suspects(self, error: Exception) -> list[TakenRecords]:
        """The records of which one may be the reason that the next batch raised this error."""
        return self._tasks.suspects(self._pipeline.failed_split(error), self._batch_size)

    def stop(self) -> None:
        """End the threads; leases stay."""
        self._tasks.close()
        self._pipeline.close()

    def close(self) -> None:
        """End the threads, and give back the tasks that are not done."""
        self.stop()
        self._client.close()
