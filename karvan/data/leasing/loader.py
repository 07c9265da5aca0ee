"""`LeasedLoader`: batches of the tasks that this process leases, and their acknowledgement.

Which process gets which records is decided while a job runs, so that processes may come, go and be slow. The
records of a batch are done when the caller says so (`acknowledge`), in the order of the batches. If a process
dies, the records that it has not acknowledged are leased by others.

An error of reading, decoding or the transform is raised to the caller, who acknowledges what is done and then
reports it (`failure_reports.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from karvan.activity import activity
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.leased_tasks import LeasedTasks
from karvan.data.leasing.task_pipeline import TaskPipeline
from karvan.data.leasing.task_records import TakenRecords, records_done
from karvan.data.loading.batch_steps import Decode, Transform
from karvan.data.retry import RETRY_SECONDS
from karvan.data.source import Source
from karvan.ragged import Batch
from karvan.work.task import TaskKind


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
