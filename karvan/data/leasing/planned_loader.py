"""`PlannedLoader`: the batches of an epoch that a trainer computes where steps have fixed batches.

Batch i of an epoch is task i of the plan, whoever computes it. The batches of a step are dealt out to the
trainers in turns, so that each knows its own without asking, and can read them in advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from karvan.activity import activity
from karvan.data.leasing.task_pipeline import TaskPipeline, TaskToRead
from karvan.data.leasing.task_records import TakenRecords, places_of
from karvan.data.loading.batch_steps import Decode, Transform
from karvan.data.retry import RETRY_SECONDS
from karvan.data.source import Source
from karvan.ragged import Batch
from karvan.work.task import Task, TaskLease, TaskPlan


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
