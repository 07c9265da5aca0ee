"""The loader of a job with `sharding: dynamic`: reads the tasks that trainers have leased.

Trainers lease tasks from the master, and acknowledge their records. A loader knows nothing of leases. It
reads what it is asked for:

    trainer                                          loader
    describe                                         the parts of the data, how they are cut into tasks, the
                                                       identity; "wait" after a second, until its program has
                                                       called `serve`
    statistics(whole)                                see `karvan/cluster/loader/service.py`
    read_batch(tasks, ids, to)                       the first batch of these tasks: all that the caller has
                                                       leased and not received, in order, each from its next
                                                       record on. "wait" after a second; "failed" with the
                                                       task that could not be read. ids: the features that
                                                       embedding workers get instead, if the job has some; to:
                                                       which worker, and under which name, if the trainer has
                                                       the batch and its worker was replaced
    stop_reading                                     drops what was read for this caller

A call has all that its answer depends on, and the same call has the same answer in every loader. A loader
keeps nothing of a caller but what it has read in advance.

**A loader dies.** Trainers ask another one, or its replacement, for the tasks that are left.

**A trainer dies.** What was read for it is dropped after a minute without a call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from karvan.activity import activity
from karvan.cluster.batch_messages import pack
from karvan.cluster.loader.service import (
    IdReceiver,
    LoaderService,
    LoaderStatistics,
    SendTo,
    SplitIds,
    TaskIds,
    split_by_name,
)
from karvan.data.leased_data import SharedData
from karvan.data.loading.pipeline import Closed
from karvan.data.task_records import TaskToRead, places_of, rest_of
from karvan.data.work_client import task_from
from karvan.devices import require_cpu_batches
from karvan.errors import DAMAGED, TEMPORARY, code_of, text_of
from karvan.protocol import loader as protocol
from karvan.ragged import Batch, IdsReference
from karvan.wire import Caller, Endpoint, Message, RefusedError, Request, endpoints
from karvan.wire.schema import Struct
from karvan.work.task import Task

_log = logging.getLogger("karvan.cluster")

# `TaskReading`: what a loader reads for one caller, in advance.
#
# The caller sends the tasks that it has leased and not received, in order, with every call. As long as they
# continue what was sent before, reading goes on; `extend` says whether they do.


_READY = 2  # batches that wait, packed, besides those that the pipeline has prepared
_IDLE = 60.0  # seconds without a call after which the caller counts as gone


class WantedIds(NamedTuple):
    """Which features embedding workers get instead of the caller, and which worker, if it must be one."""

    names: tuple[str, ...] = ()
    to: SendTo | None = None


class ReadFailure(NamedTuple):
    """An error that prevented the next batch, and which task that is left could not be read, if so."""

    error: BaseException
    task: int | None


class TaskReading:
    """Reads tasks of `data` on threads of its own, until `close` or until nobody has called for a minute.

    ids: sends those that are wanted to embedding workers; if to a certain one, one batch is read and no more.
    digest: of the data.
    """

    def __init__(self, data: SharedData, ids: TaskIds, wanted: WantedIds, digest: str) -> None:
        self.wanted = wanted
        self._ids = ids
        self._digest = digest
        self._changed = threading.Condition()
        self._queued: deque[TaskToRead] = deque()  # that the pipeline has not taken
        self._left: list[TaskToRead] = []  # that were not handed out, from the next record on
        # Batches, or the error that prevented one, with the reference to ids that a worker has.
        self._ready: deque[tuple[Message[protocol.TaskBatch] | BaseException, IdsReference | None]] = deque()
        self._over = False  # whether there will be no more batches
        self._pipeline = data.read_tasks(self._tasks())
        threading.Thread(target=self._read, name="karvan-task-reading", daemon=True).start()

    def extend(self, tasks: Sequence[TaskToRead]) -> bool:
        """Read these tasks; False: they do not continue those of the last call, or reading has ended."""
        with self._changed:
            count = len(self._left)
            if self.over or list(tasks[:count]) != self._left:
                return False
            self._queued += tasks[count:]
            self._left += tasks[count:]
            self._changed.notify_all()
            return True

    def take(self, seconds: float) -> Message[protocol.TaskBatch] | ReadFailure | None:
        """The first batch of the tasks that are left; None if it is not ready in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._over, seconds)
            if not self._ready:
                return None
            ready, _ = self._ready.popleft()
            self._changed.notify_all()
            if isinstance(ready, BaseException):
                return ReadFailure(ready, self._task_to_blame(ready))
            self._left = rest_of(self._left, ready.head.records)
            return ready

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._over = True
            self._drop_ready()
            self._changed.notify_all()
        self._pipeline.close()

    @property
    def over(self) -> bool:
        """Whether its threads have ended, and all batches were taken."""
        return self._over and not self._ready

    def _drop_ready(self) -> None:
        """Nobody will take what is ready."""
        if self.wanted.to is None:  # otherwise the batch is that of a trainer, which waits for it
            self._ids.forget(reference for _, reference in self._ready if reference is not None)
        self._ready.clear()

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
                task = self._queued.popleft()
            yield task
            yield None  # so that it does not wait for the next one

    def _has_room(self) -> bool:
        return self._over or len(self._ready) < (_READY if self.wanted.to is None else 1)

    def _read(self) -> None:
        """The thread: packs batches while there is room."""
        try:
            while (outcome := self._pipeline.next()).batch is not None:
                ready = self._pack(outcome.batch, sum(receipt.records for receipt in outcome.receipts))
                activity.advance()
                with self._changed:
                    self._ready.append(ready)
                    self._changed.notify_all()
                    room = self._changed.wait_for(self._has_room, _IDLE)
                    if self._over or self.wanted.to is not None or not room:
                        self._drop_ready()
                        break
        except Closed:
            pass
        except BaseException as error:
            with self._changed:
                if not self._over:
                    self._ready.append((error, None))
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._pipeline.close()

    def _pack(self, batch: Batch, records: int) -> tuple[Message[protocol.TaskBatch], IdsReference | None]:
        """A batch of so many records, as it is sent, after its ids were."""
        rest, reference = self._ids.send(batch, *self.wanted, lambda: self._over)
        packed = pack(rest)
        head = protocol.TaskBatch(**packed.head, records=records, samples=rest.samples, digest=self._digest)
        return Message(head, packed.arrays), reference


_KINDS = {DAMAGED: "damaged", TEMPORARY: "temporary"}


class TaskService(LoaderService[protocol.Description]):
    """A loader of leased tasks: `offer` sets the data, trainers call the endpoints."""

    hello = Struct(protocol.TaskReadingHello)

    def __init__(
        self, index: int = 0, *, workers: Sequence[IdReceiver] = (), split: SplitIds = split_by_name
    ) -> None:
        super().__init__(index)
        self._data: SharedData | None = None
        self._records: dict[str, int] = {}  # by path
        self._ids = TaskIds(workers, split)
        self._readings: dict[str, TaskReading] = {}  # by session of the caller
        self.endpoints = endpoints(
            protocol.TASK_READING_CALLS,
            Endpoint(protocol.DESCRIBE, self._answer_description),
            Endpoint(protocol.STATISTICS, self._answer_statistics),
            Endpoint(protocol.READ_BATCH, self._read_batch),
            Endpoint(protocol.STOP_READING, lambda call: self._drop(call.caller.session)),
        )

    def offer(self, data: SharedData, statistics: LoaderStatistics | None = None) -> None:
        """Read tasks of this data from now on; statistics: of its transforms."""
        require_cpu_batches(data)
        self._data, self._records = data, dict(data.parts)
        self._describe_data(_description_of(data, statistics or LoaderStatistics()), statistics)

    def wait_until_closed(self) -> None:
        """Wait for `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed)

    @override
    def welcome(self, caller: Caller) -> dict[str, Any]:
        if caller.hello.loader != self._index:
            raise RefusedError(
                f"expected to be asked for as loader {self._index}, got {caller.hello.loader}."
            )
        return {"loader": self._index}

    @override
    def close(self) -> None:
        super().close()
        with self._changed:
            readings, self._readings = self._readings, {}
        for reading in readings.values():
            reading.close()

    def _read_batch(self, call: Request[protocol.RequestedTasks]) -> Message[Any]:
        description = self._described()
        if description is None:
            return Message(protocol.NoAnswerYet(wait=True))
        assert self._data is not None
        tasks = [TaskToRead(task_from(task.task), task.ends) for task in call.head.tasks]
        for task, _ in tasks:
            self._check(task)
        session, to = call.caller.session, call.head.to
        wanted = WantedIds(tuple(call.head.ids), None if to is None else SendTo(to.worker, to.name))
        reading = self._readings.get(session)
        if reading is None or reading.wanted != wanted or not reading.extend(tasks):
            self._drop(session)
            reading = TaskReading(self._data, self._ids, wanted, description.digest)
            self._add(session, reading)
            reading.extend(tasks)
        batches = reading.take(self.wait)
        if batches is None:
            return Message(protocol.NoAnswerYet(wait=True))
        if isinstance(batches, ReadFailure):
            self._drop(session)
            return self._failed(batches)
        return batches

    def _check(self, task: Task) -> None:
        records = self._records.get(task.path)
        if records is None or task.first + task.records > records or not len(places_of(task)):
            raise RefusedError(
                f"expected a task with unread records, got {task}: {task.done} are done, and there is "
                f"{'no such file' if records is None else f'{records} records in the file'}."
            )

    def _add(self, session: str, reading: TaskReading) -> None:
        with self._changed:
            if self.closed:
                reading.close()
                raise RefusedError("expected to be running, but it is closed.")
            self._readings = {
                name: reading_ for name, reading_ in self._readings.items() if not reading_.over
            }
            self._readings[session] = reading

    def _drop(self, session: str) -> None:
        with self._changed:
            reading = self._readings.pop(session, None)
        if reading is not None:
            reading.close()

    def _failed(self, failure: ReadFailure) -> Message[protocol.FailedTask]:
        error, code = failure.error, code_of(failure.error)
        self.note_failure(error)
        text = f"{type(error).__name__}: {error}"
        if code in _KINDS:
            _log.error("%s could not read a task: %s", self.name, text_of(error))
        else:
            _log.error("%s could not read a task", self.name, exc_info=error)
        kind = _KINDS.get(code, "failed")
        return Message(protocol.FailedTask(failed=text[:20_000], task=failure.task, kind=kind))


def _description_of(data: SharedData, statistics: LoaderStatistics) -> protocol.Description:
    """What trainers have to know of the data that loaders read for them.

    Its digest is of all of it and of the statistics of transforms, so that batches of loaders that differ are
    noticed.
    """
    fields: dict[str, Any] = {
        "parts": data.parts,
        "records_per_task": data.records_per_task,
        "seed": data.seed,
        "batch_size": data.batch_size,
        "identity": data.identity().state(),
    }
    text = json.dumps([{**fields, "digest": ""}, statistics.digests], sort_keys=True)
    return protocol.Description(**fields, digest=hashlib.sha256(text.encode()).hexdigest()[:16])
