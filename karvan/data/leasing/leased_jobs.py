"""`LeasedJobs`: leased tasks as jobs of a loader's pipeline, and which records its batches contain.

The pipeline hands out the records of jobs in order. So the records of its next batch are the first ones, of
the first tasks, that no batch has contained before; `take` says how far they reach in each task.

A task that is followed by one of another epoch, or by none for now, ends a batch: batches do not span epochs,
and must not wait for records that others may still be working on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from karvan.data.leasing.client import WorkClient
from karvan.data.loading.read_jobs import Order, ReadJob
from karvan.data.loading.splits import permutation
from karvan.data.source import Split
from karvan.work.ledger import NoTask
from karvan.work.task import Task, TaskLease

_log = logging.getLogger("karvan.data")

_LONG = 30.0  # seconds after which a warning says what it waits for
_POLL = 0.1  # seconds between two questions for a task while others work on the last ones of an epoch


class RecordsDone(NamedTuple):
    """How many records of a task are done when the batches so far are, and whether these are all."""

    token: int
    done: int
    complete: bool


class LeasedJobs:
    """Iterates over jobs, with None between them: each is read alone, so that errors have a task.

    tasks_ahead: how many tasks are leased at a time. seed: of the order of records inside of a task; None for
    the order of the source. epoch: whose tasks to lease, None for those of all.
    """

    def __init__(
        self,
        client: WorkClient,
        *,
        seed: int | None,
        tasks_ahead: int = 2,
        epoch: int | None = None,
    ) -> None:
        self._epoch = epoch
        self._client = client
        self._seed = seed
        self._tasks_ahead = tasks_ahead
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: deque[tuple[TaskLease, Order]] = deque()  # places that are in no batch yet
        self._waits = False  # whether there is no task for now

    def __iter__(self) -> Iterator[ReadJob | None]:
        before: TaskLease | None = None
        for lease in self._leases():
            if before is not None:
                ends = lease is None or lease.task.epoch != before.task.epoch
                yield from self._job(before, last=ends)
                yield None
            before = lease

    def _leases(self) -> Iterator[TaskLease | None]:
        """All leases; None where there is none for now, and at the end."""
        waited = 0.0
        while not self._closed.is_set():
            got = self._client.lease(most=self._tasks_ahead, epoch=self._epoch)
            self._waits = not isinstance(got, list)
            if isinstance(got, list):
                yield from got
                waited = 0.0
                continue
            yield None
            if got is NoTask.DONE:
                return
            self._closed.wait(_POLL)
            waited += _POLL
            if waited - _POLL < _LONG <= waited:
                _log.warning(
                    "There was no task for %d s: others still work on this epoch. If nobody does, a "
                    "DataLoader with several workers lacks in_order=False, or nobody acknowledges batches.",
                    _LONG,
                )

    def _job(self, lease: TaskLease, last: bool) -> Iterator[ReadJob]:
        task = lease.task
        places = places_of(task)
        if not len(places):
            self._client.acknowledge({lease.token: task.records}, [lease.token])
            return
        with self._lock:
            self._open.append((lease, places))
        split = Split(task.path, task.first, task.records)
        if self._seed is None and len(places) == task.records:
            yield ReadJob(task.epoch, (split,), len(places), last=last)
            return
        seed = self._seed

        def order() -> Order:
            if seed is None:
                return places
            return permutation(task.records, seed, task.epoch, task.number)[places]

        yield ReadJob(task.epoch, (split,), len(places), order, last=last)

    @property
    def idle(self) -> bool:
        """Whether all records that were leased are in batches, and there is no task for now."""
        with self._lock:
            return self._waits and not self._open

    def take(self, records: int) -> list[RecordsDone]:
        """A batch of this many records was handed out: how far it reaches in each of its tasks."""
        reached = []
        with self._lock:
            while records:
                lease, places = self._open.popleft()
                taken = min(records, len(places))
                records -= taken
                rest = places[taken:]
                done = int(rest[0]) if len(rest) else lease.task.records
                reached.append(RecordsDone(lease.token, done, not len(rest)))
                if len(rest):
                    self._open.appendleft((lease, rest))
        return reached

    def task_to_blame(self, split: Split | None) -> TaskLease | None:
        """The task of a split that could not be read; of an error elsewhere, that of the next batch."""
        with self._lock:
            leases = [lease for lease, _ in self._open]
        if split is not None:
            leases = [
                each for each in leases if (each.task.path, each.task.first) == (split.path, split.first)
            ]
        return leases[0] if leases else None

    def close(self) -> None:
        """Lease no more."""
        self._closed.set()


def places_of(task: Task) -> Order:
    """The records of a task that are left, by their places in its order."""
    places = np.arange(task.done, task.records)
    return places[~np.isin(places, task.skipped)]
