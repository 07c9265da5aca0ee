"""The records of a task: in which order they are handed out, which are left, and how they are read.

A record of a task has a *place* in the order in which the task hands its records out, and a *number* in its
file. Without a seed both grow together. With one, the order is a permutation that depends on (seed, epoch,
task) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from karvan.data.loading.batch_steps import BatchSteps, Decode, Transform
from karvan.data.loading.pipeline import Pipeline, ReadOutcome, make_delivery
from karvan.data.loading.read_jobs import Order, ReadJob
from karvan.data.loading.splits import MOST_RECORDS_PER_SPLIT, permutation
from karvan.data.retry import RETRY_SECONDS, RetryingSource
from karvan.data.source import Part, Source, Split
from karvan.work.task import Task, TaskLease


class TakenRecords(NamedTuple):
    """Records of a task that a batch contains, by their places.

    done: how many records of the task are done when the batch is.
    """

    lease: TaskLease
    places: Order
    done: int


def records_done(taken: Iterable[TakenRecords]) -> dict[int, int]:
    """How many records of each leased task are done when a batch is, by token."""
    return {each.lease.token: each.done for each in taken}


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


# `TaskPipeline`: reads tasks in advance and gives their batches in order, wherever the tasks come from.


class TaskToRead(NamedTuple):
    """A task, and whether a batch ends with its last record; otherwise one may go on in the next task."""

    task: Task
    ends: bool


class TaskPipeline:
    """Iterates over tasks on threads; None between two tasks keeps them apart, so that errors have a task.

    seed: of the order of records inside of each task, None for the order of the source. device: the GPU that
    batches go to, if any. The other arguments are those of `Loader`.
    """

    def __init__(
        self,
        source: Source,
        decode: Decode,
        batch_size: int,
        tasks: Iterator[TaskToRead | None],
        *,
        seed: int | None,
        transform: Transform | None = None,
        workers: int = 2,
        prefetch: int = 4,
        retry_seconds: float = RETRY_SECONDS,
        device: torch.device | None = None,
    ) -> None:
        self._source = RetryingSource(source, retry_seconds)
        self._reads = _Reads(self._source)
        self._pipeline = Pipeline(
            self._reads,
            (None if each is None else read_job(each.task, seed, last=each.ends) for each in tasks),
            BatchSteps(decode, transform),
            batch_size=batch_size,
            drop_remainder=False,
            workers=workers,
            prefetch=prefetch,
            buffer=MOST_RECORDS_PER_SPLIT,
            delivery=make_delivery(device),
        )

    def next(self) -> ReadOutcome:
        """Wait for the next batch, an error, or the end of a task."""
        return self._pipeline.next()

    def failed_split(self, error: BaseException) -> Split | None:
        """The split whose reading raised this error."""
        return self._reads.failed_split(error)

    def close(self) -> None:
        """End the threads."""
        self._source.close()
        self._pipeline.close()


def after(task: Task, records: int) -> Task | None:
    """What is left of a task when this many of the records that were left have been read; None: nothing."""
    rest = places_of(task)[records:]
    return task._replace(done=int(rest[0])) if len(rest) else None


class _Reads:
    """A source that remembers which split an error came from."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._failed: list[tuple[Exception, Split]] = []

    @property
    def schema(self) -> pa.Schema:
        return self._source.schema

    def parts(self) -> list[Part]:
        return self._source.parts()

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._source.read(split)
        except Exception as error:
            self._failed.append((error, split))
            raise

    def failed_split(self, error: BaseException) -> Split | None:
        """The split whose reading raised this error."""
        return next((split for each, split in self._failed if each is error), None)
