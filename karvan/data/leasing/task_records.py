"""The records of a task: in which order they are handed out, which are left, and how they are read.

A record of a task has a *place* in the order in which the task hands its records out, and a *number* in its
file. Without a seed both grow together. With one, the order is a permutation that depends on (seed, epoch,
task) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from karvan.data.loading.pipeline import ReadPlan
from karvan.data.loading.read_jobs import Order, ReadJob
from karvan.data.loading.shuffle import permutation
from karvan.data.source import Split
from karvan.work.task import Task, TaskLease


class TakenRecords(NamedTuple):
    """Records of a task that a batch contains, by their places.

    done: how many records of the task are done when the batch is.
    """

    lease: TaskLease
    places: Order
    done: int


def records_done(batches: Iterable[TakenRecords]) -> dict[int, int]:
    """How many records of each leased task are done when a batch is, by token."""
    return {records.lease.token: records.done for records in batches}


def places_of(task: Task) -> Order:
    """The records of a task that are left, by their places."""
    places = np.arange(task.done, task.records)
    return places[~np.isin(places, task.skipped)]


def numbers_of(task: Task, places: Order, seed: int | None) -> Order:
    """The numbers of records in their file, by their places."""
    if seed is None:
        return task.first + places
    return task.first + permutation(task.records, seed, task.epoch, task.number)[places]


def place_of(task: Task, number: int, seed: int | None) -> int:
    """The place of a record, by its number in the file."""
    return int(np.flatnonzero(numbers_of(task, np.arange(task.records), seed) == number)[0])


def splits_of(path: str, numbers: Order) -> tuple[Split, ...]:
    """Splits that read these records and no others; the numbers grow."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return tuple(Split(path, int(run[0]), len(run)) for run in runs if len(run))


def read_job(task: Task, seed: int | None, *, last: bool) -> ReadJob:
    """Reads the records that are left, in their order. Those that are skipped are not even read."""
    places = places_of(task)
    split = Split(task.path, task.first, task.records)
    if seed is None and len(places) == task.records:
        return ReadJob(task.epoch, (split,), len(places), last=last)
    if not task.skipped:
        return ReadJob(
            task.epoch, (split,), len(places), lambda: numbers_of(task, places, seed) - task.first, last=last
        )
    skipped = np.sort(numbers_of(task, np.asarray(task.skipped), seed))
    read = np.setdiff1d(np.arange(task.first, task.first + task.records), skipped)

    def order() -> Order:
        return np.searchsorted(read, numbers_of(task, places, seed))

    return ReadJob(task.epoch, splits_of(task.path, read), len(places), order, last=last)


class TaskToRead(NamedTuple):
    """A task, and whether a batch ends with its last record; otherwise one may go on in the next task."""

    task: Task
    ends: bool


class TaskReads(ReadPlan):
    """Reads tasks, wherever they come from; None between two keeps them apart, so that errors have a task.

    seed: of the order of records inside of each task, None for the order of the source.
    """

    def __init__(self, tasks: Iterator[TaskToRead | None], seed: int | None) -> None:
        self._reads = (None if task is None else read_job(task.task, seed, last=task.ends) for task in tasks)

    @override
    def jobs(self) -> Iterator[ReadJob | None]:
        return self._reads


def after(task: Task, records: int) -> Task | None:
    """What is left of a task when this many of the records that were left have been read; None: nothing."""
    rest = places_of(task)[records:]
    return task._replace(done=int(rest[0])) if len(rest) else None


def rest_of(tasks: Iterable[TaskToRead], records: int) -> list[TaskToRead]:
    """What is left of tasks after this many of the records that were left have been read."""
    rest = list(tasks)
    while records:
        task, ends = rest.pop(0)
        remaining = after(task, records)
        records -= min(records, len(places_of(task)))
        if remaining is not None:
            rest.insert(0, TaskToRead(remaining, ends))
    return rest
