"""`TaskPipeline`: reads tasks in advance and gives their batches in order, wherever the tasks come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import torch

from karvan.data.leasing.task_records import places_of, read_job
from karvan.data.loading.batch_steps import BatchSteps, Decode, Transform
from karvan.data.loading.device_delivery import make_delivery
from karvan.data.loading.pipeline import Pipeline, ReadOutcome
from karvan.data.loading.splits import MOST_RECORDS_PER_SPLIT
from karvan.data.retry import RETRY_SECONDS, RetryingSource
from karvan.data.source import Part, Source, Split
from karvan.work.task import Task


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
