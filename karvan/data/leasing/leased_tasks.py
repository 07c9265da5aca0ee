"""`LeasedTasks`: the tasks that a process leases, and which of their records its batches contain.

Whoever reads them hands out the records of tasks in order. So the records of the next batch are the first
ones, of the first tasks, that no batch has contained before; `take` says how far they reach in each task.

A task that is followed by one of another epoch, or by none for now, ends a batch: batches do not span epochs,
and must not wait for records that others may still be working on. So does every task of an evaluation or a
prediction: its batches are the same ones whoever computes them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.task_pipeline import TaskToRead
from karvan.data.leasing.task_records import TakenRecords, places_of
from karvan.data.loading.read_jobs import Order
from karvan.data.source import Split
from karvan.work.ledger import NoTask
from karvan.work.task import TaskKind, TaskLease

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
