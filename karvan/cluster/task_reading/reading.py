"""`TaskReading`: what a loader reads for one caller, in advance.

The caller sends the tasks that it has leased and not received, in order, with every call. As long as they
continue what was sent before, reading goes on; `extend` says whether they do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from karvan.activity import activity
from karvan.data.leasing.shared_data import SharedData
from karvan.data.leasing.task_records import TaskToRead, after, places_of
from karvan.data.loading.pipeline import Closed
from karvan.ragged import Batch, IdsReference
from karvan.wire import Message

_READY = 2  # batches that wait, packed, besides those that the pipeline has prepared
_IDLE = 60.0  # seconds without a call after which the caller counts as gone


class ReadBatch(NamedTuple):
    """A batch as a message, how many records of the tasks it has, and where its ids are, if not in it."""

    message: Message
    records: int
    ids: IdsReference | None = None


class BatchPacker(Protocol):
    """Makes messages of the batches of one caller."""

    def pack(self, batch: Batch, records: int, closed: Callable[[], bool]) -> ReadBatch:
        """A batch of so many records, as it is sent; closed: whether nobody waits for it any more."""

    def drop(self, batches: Sequence[ReadBatch]) -> None:
        """These will not be sent."""


class ReadFailure(NamedTuple):
    """An error that prevented the next batch, and which task that is left could not be read, if so."""

    error: BaseException
    task: int | None


class TaskReading:
    """Reads tasks of `data` on threads of its own, until `close` or until nobody has called for a minute.

    alone: whether to read one batch and no more.
    """

    def __init__(self, data: SharedData, packer: BatchPacker, *, alone: bool = False) -> None:
        self._packer = packer
        self._alone = alone
        self._changed = threading.Condition()
        self._queued: deque[TaskToRead] = deque()  # that the pipeline has not taken
        self._left: deque[TaskToRead] = deque()  # that were not handed out, from the next record on
        self._ready: deque[ReadBatch | BaseException] = deque()
        self._over = False  # whether there will be no more batches
        self._pipeline = data.read_tasks(self._tasks())
        self._thread = threading.Thread(target=self._read, name="karvan-task-reading", daemon=True)
        self._thread.start()

    def extend(self, tasks: Sequence[TaskToRead]) -> bool:
        """Read these tasks; False: they do not continue those of the last call, or reading has ended."""
        with self._changed:
            known = len(self._left)
            if (self._over and not self._ready) or list(tasks[:known]) != list(self._left):
                return False
            self._queued += tasks[known:]
            self._left += tasks[known:]
            self._changed.notify_all()
            return True

    def take(self, seconds: float) -> ReadBatch | ReadFailure | None:
        """The first batch of the tasks that are left; None if it is not ready in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._over, seconds)
            if not self._ready:
                return None
            ready = self._ready.popleft()
            self._changed.notify_all()
            if isinstance(ready, BaseException):
                return ReadFailure(ready, self._task_to_blame(ready))
            self._advance(ready.records)
            return ready

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._over = True
            self._drop_ready()
            self._changed.notify_all()
        self._pipeline.close()

    def _drop_ready(self) -> None:
        """Nobody will take what is ready."""
        self._packer.drop([each for each in self._ready if isinstance(each, ReadBatch)])
        self._ready.clear()

    @property
    def over(self) -> bool:
        """Whether its threads have ended, and all batches were taken."""
        return self._over and not self._ready

    def _advance(self, records: int) -> None:
        while records:
            task, ends = self._left.popleft()
            rest = after(task, records)
            records -= min(records, len(places_of(task)))
            if rest is not None:
                self._left.appendleft(TaskToRead(rest, ends))

    def _task_to_blame(self, error: BaseException) -> int | None:
        split = self._pipeline.failed_split(error)
        for index, (task, _) in enumerate(self._left if split is not None else ()):
            assert split is not None
            if task.path == split.path and task.first <= split.first < task.first + task.records:
                return index
        return None

    def _tasks(self) -> Iterator[TaskToRead | None]:
        """Tasks for the pipeline, on one of its threads."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._queued, _IDLE)
                if self._over or not self._queued:
                    return
                each = self._queued.popleft()
            yield each
            yield None  # so that it does not wait for the next one

    def _has_room(self) -> bool:
        return self._over or len(self._ready) < (1 if self._alone else _READY)

    def _read(self) -> None:
        """The thread: packs batches while there is room."""
        try:
            while (outcome := self._pipeline.next()).batch is not None:
                records = sum(receipt.records for receipt in outcome.receipts)
                made = self._packer.pack(outcome.batch, records, lambda: self._over)
                activity.advance()
                with self._changed:
                    self._ready.append(made)
                    self._changed.notify_all()
                    room = self._changed.wait_for(self._has_room, _IDLE)
                    if self._over or self._alone or not room:
                        self._drop_ready()
                        break
        except Closed:
            pass
        except BaseException as error:
            with self._changed:
                if not self._over:
                    self._ready.append(error)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._pipeline.close()
