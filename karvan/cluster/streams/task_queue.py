"""Where the tasks of a `TaskStream` come from: leases, or the plan of an epoch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from typing_extensions import override

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.leased_data import LeasedTasks, planned_records
from karvan.data.leasing.task_records import TakenRecords, TaskToRead, places_of
from karvan.data.source import Split

_TASKS = 2  # that are known in advance, so that a loader reads one while batches of the other are sent


class TaskQueue(Protocol):
    """The tasks that one stream reads, in order."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to read for now."""

    def left(self) -> list[TaskToRead]:
        """The tasks that were not received, each from its next record on; waits until they have a batch.

        Empty: the end.
        """

    def take(self, records: int) -> list[TakenRecords]:
        """A batch of this many records was received: which ones of each task."""

    def suspects(self, task: int | None) -> list[TakenRecords]:
        """The records of the task that could not be read, by its index in `left`; None: of the next batch."""

    def close(self) -> None:
        """Stop; no batch is taken any more."""

    def join(self, seconds: float) -> None:
        """Wait after `close` until no task is leased any more."""


class LeasedQueue(TaskQueue):
    """Tasks of an epoch that are leased in the background, so much that the next two batches are known."""

    def __init__(self, client: WorkClient, epoch: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self._tasks = LeasedTasks(client, tasks_ahead=1, epoch=epoch)
        self._changed = threading.Condition()
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._lease, name="karvan-leases", daemon=True)
        self._thread.start()

    @property
    @override
    def idle(self) -> bool:
        return self._tasks.idle

    @override
    def left(self) -> list[TaskToRead]:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._has_batch())
            if self._error is not None:
                raise self._error
            return self._tasks.left()

    @override
    def take(self, records: int) -> list[TakenRecords]:
        with self._changed:
            taken = self._tasks.take(records)
            self._changed.notify_all()
            return taken

    @override
    def suspects(self, task: int | None) -> list[TakenRecords]:
        split = None
        if task is not None:
            failed = self._tasks.left()[task].task
            split = Split(failed.path, failed.first, failed.records)
        return self._tasks.suspects(split, self._batch_size)

    @override
    def close(self) -> None:
        self._tasks.close()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @override
    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _lease(self) -> None:
        try:
            for _ in self._tasks:
                with self._changed:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._over or not self._has_enough())
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _has_batch(self) -> bool:
        left = self._tasks.left()
        return _records_of(left) >= self._batch_size or any(each.ends for each in left)

    def _has_enough(self) -> bool:
        left = self._tasks.left()
        return len(left) >= _TASKS and _records_of(left) >= 2 * self._batch_size


def _records_of(tasks: list[TaskToRead]) -> int:
    """How many records have to be read."""
    return sum(len(places_of(each.task)) if each.task.skipped else each.task.left for each in tasks)


class PlannedQueue(TaskQueue):
    """Tasks of a plan, each of which is a batch, with their numbers in the epoch in place of tokens."""

    idle = False

    def __init__(self, tasks: Iterator[tuple[int, TaskToRead]]) -> None:
        self._tasks = tasks
        self._left: deque[tuple[int, TaskToRead]] = deque()
        self._closed = False

    @override
    def left(self) -> list[TaskToRead]:
        while len(self._left) < 2 * _TASKS and (following := next(self._tasks, None)) is not None:
            self._left.append(following)
        return [] if self._closed else [each for _, each in self._left]

    @override
    def take(self, records: int) -> list[TakenRecords]:
        number, (task, _) = self._left.popleft()
        if records != task.left:
            raise RuntimeError(f"Expected a batch of {task.left} records, got one of {records}.")
        return planned_records(number, task)

    @override
    def suspects(self, task: int | None) -> list[TakenRecords]:
        number, (failed, _) = self._left[task or 0]
        return planned_records(number, failed)

    @override
    def close(self) -> None:
        self._closed = True

    @override
    def join(self, seconds: float) -> None:
        """Nothing is leased."""
