"""`PlannedLoader`: the batches of an epoch that a trainer computes where steps have fixed batches.

Batch i of an epoch is task i of the plan, whoever computes it. The batches of a step are dealt out to the
trainers in turns, so that each knows its own without asking, and can read them in advance.
"""

from __future__ import annotations

from collections.abc import Iterator

from karvan.activity import activity
from karvan.data.leasing.task_records import TakenRecords, places_of, read_job
from karvan.data.loading.batch_steps import BatchSteps, Decode, Transform
from karvan.data.loading.pipeline import Pipeline
from karvan.data.loading.read_jobs import ReadJob
from karvan.data.loading.splits import MOST_RECORDS_PER_SPLIT
from karvan.data.retry import RETRY_SECONDS, RetryingSource
from karvan.data.source import Source
from karvan.ragged import Batch
from karvan.work.task import TaskLease
from karvan.work.task_plan import TaskPlan


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
    ) -> None:
        self._plan = plan
        self._epoch = epoch
        self._seed = seed
        self._handed_out = self._numbers(first, rank, ranks, of_step)
        self._last = -1
        self._source = RetryingSource(source, retry_seconds)
        self._pipeline = Pipeline(
            self._source,
            map(self._job, self._numbers(first, rank, ranks, of_step)),
            BatchSteps(decode, transform),
            batch_size=plan.records_per_task,
            drop_remainder=False,
            workers=workers,
            prefetch=prefetch,
            buffer=MOST_RECORDS_PER_SPLIT,
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
        """See `LeasedLoader.suspects`."""
        return self._records(next(self._handed_out))

    def stop(self) -> None:
        """End the threads."""
        self._source.close()
        self._pipeline.close()

    def _numbers(self, first: int, rank: int, ranks: int, of_step: int) -> Iterator[int]:
        return (number for number in range(first, len(self._plan)) if number % of_step % ranks == rank)

    def _job(self, number: int) -> ReadJob:
        return read_job(self._plan.task(self._epoch, number), self._seed, last=True)

    def _records(self, number: int) -> list[TakenRecords]:
        task = self._plan.task(self._epoch, number)
        return [TakenRecords(TaskLease(number, "", task), places_of(task), 1)]
