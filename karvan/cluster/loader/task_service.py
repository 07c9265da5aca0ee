"""The loader of a job with `sharding: dynamic`: reads the tasks that trainers have leased.

Trainers lease tasks from the master, and acknowledge their records. A loader knows nothing of leases. It
reads what it is asked for:

    trainer                                          loader
    describe                                         the parts of the data, how they are cut into tasks, the
                                                       identity; "wait" after a second, until its program has
                                                       called `serve`
    statistics(whole)                                see `karvan/cluster/loader/statistics.py`
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from karvan.activity import activity
from karvan.cluster.batch_messages import pack
from karvan.cluster.loader.id_forwarding import IdReceiver, SendTo, SplitIds, TaskIds, split_by_name
from karvan.cluster.loader.statistics import LoaderStatistics
from karvan.data.identity import Identity
from karvan.data.leasing.client import task_from
from karvan.data.leasing.shared_data import SharedData
from karvan.data.leasing.task_records import TaskToRead, after, places_of
from karvan.data.loading.pipeline import Closed
from karvan.devices import require_cpu_batches
from karvan.exit_codes import DAMAGED, TEMPORARY, code_of, text_of
from karvan.protocol import loader as protocol
from karvan.ragged import Batch, IdsReference
from karvan.wire import Caller, Endpoint, Message, RefusedError, Request, Service, endpoints
from karvan.wire.schema import Head, Struct
from karvan.work.task import Task

# `DataDescription`: what trainers have to know of the data that loaders read for them.


@dataclass(frozen=True)
class DataDescription:
    """The parts of the data and how they are cut into tasks and batches.

    digest: of all of it and of the statistics of transforms, so that batches of loaders that differ are
    noticed.
    """

    parts: tuple[tuple[str, int], ...]
    records_per_task: int
    seed: int | None
    batch_size: int
    identity: Identity
    digest: str = ""

    @classmethod
    def of(cls, data: SharedData, statistics: LoaderStatistics) -> DataDescription:
        """The description of some data."""
        made = cls(data.parts, data.records_per_task, data.seed, data.batch_size, data.identity())
        text = json.dumps([vars(made.as_head()), statistics.digests], sort_keys=True)
        return cls(**{**vars(made), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]})

    def as_head(self) -> protocol.Description:
        """Its fields, for a message."""
        return protocol.Description(**{**vars(self), "identity": self.identity.state()})

    @classmethod
    def from_head(cls, head: protocol.Description) -> DataDescription:
        """The description that `as_head` made."""
        identity = Identity.from_state(head.identity)
        return cls(**{**vars(head), "parts": tuple(head.parts), "identity": identity})

    def difference(self, other: DataDescription) -> str:
        """What differs, in words; empty if nothing does."""
        names = {"parts": "files", "identity": "content of the files"}
        for name in ("parts", "batch_size", "seed", "records_per_task", "identity"):
            if getattr(self, name) != getattr(other, name):
                return names.get(name, name)
        return ""


# `TaskReading`: what a loader reads for one caller, in advance.
#
# The caller sends the tasks that it has leased and not received, in order, with every call. As long as they
# continue what was sent before, reading goes on; `extend` says whether they do.


_READY = 2  # batches that wait, packed, besides those that the pipeline has prepared
_IDLE = 60.0  # seconds without a call after which the caller counts as gone


class ReadBatch(NamedTuple):
    """A batch as a message, how many records of the tasks it has, and where its ids are, if not in it."""

    message: Message[protocol.TaskBatch]
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


_log = logging.getLogger("karvan.cluster")

_WAIT = 1.0  # seconds until a call is answered, even if there is nothing to send yet
_KINDS = {DAMAGED: "damaged", TEMPORARY: "temporary"}


class SentParts(NamedTuple):
    """What a caller wants of its batches: which features embedding workers get, and which worker, if one."""

    ids: tuple[str, ...] = ()
    to: SendTo | None = None


class TaskReadingService(Service):
    """Loader number `index`: `offer` sets the data, trainers call the endpoints."""

    hello = Struct(protocol.TaskReadingHello)

    progresses = False  # calls are not progress; batches are, see `TaskReading`

    def __init__(
        self,
        index: int = 0,
        *,
        workers: Sequence[IdReceiver] = (),
        split: SplitIds = split_by_name,
    ) -> None:
        self.name = f"loader {index}"
        self._index = index
        self._changed = threading.Condition()
        self._data: SharedData | None = None
        self._description: DataDescription | None = None
        self._records: dict[str, int] = {}  # by path
        self._statistics = LoaderStatistics()
        self._ids = TaskIds(workers, split)
        self._readings: dict[str, tuple[SentParts, TaskReading]] = {}  # by session of the caller
        self._closed = False
        self.endpoints = endpoints(
            protocol.TASK_READING_CALLS,
            Endpoint(protocol.DESCRIBE, self._describe),
            Endpoint(protocol.STATISTICS, self._answer_statistics),
            Endpoint(protocol.READ_BATCH, self._read_batch),
            Endpoint(protocol.STOP_READING, self._stop_reading),
        )

    @property
    def statistics(self) -> LoaderStatistics | None:
        """The statistics that trainers receive; None before there is data."""
        return None if self._data is None else self._statistics

    def offer(self, data: SharedData, statistics: LoaderStatistics | None = None) -> None:
        """Read tasks of this data from now on; statistics: of its transforms."""
        require_cpu_batches(data)
        found = statistics or LoaderStatistics()
        description = DataDescription.of(data, found)
        with self._changed:
            self._data, self._statistics, self._description = data, found, description
            self._records = dict(data.parts)
            self._changed.notify_all()

    def wait_until_closed(self) -> None:
        """Wait for `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed)

    @override
    def welcome(self, caller: Caller) -> dict[str, Any]:
        if caller.hello.loader != self._index:
            raise RefusedError(
                f"expected to be asked for as loader {self._index}, got {caller.hello.loader}."
            )
        return {"loader": self._index}

    @override
    def close(self) -> None:
        with self._changed:
            self._closed = True
            readings, self._readings = list(self._readings.values()), {}
            self._changed.notify_all()
        for _, reading in readings:
            reading.close()

    def _offered(self) -> tuple[SharedData, DataDescription] | None:
        """The data, once the program has offered it; None if that takes longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._data is not None, _WAIT)
            if self._data is None or self._description is None:
                return None
            return self._data, self._description

    def _describe(self, call: Request[Head]) -> Message[protocol.NoAnswerYet | protocol.Description]:
        offered = self._offered()
        return Message(protocol.NoAnswerYet(wait=True) if offered is None else offered[1].as_head())

    def _answer_statistics(self, call: Request[protocol.Whole]) -> Message[Any]:
        started = self._offered() is not None
        return (
            self._statistics.message(call.head.whole) if started else Message(protocol.NoAnswerYet(wait=True))
        )

    def _stop_reading(self, call: Request[Head]) -> Message:
        self._drop(call.caller.session)
        return Message({})

    def _read_batch(self, call: Request[protocol.RequestedTasks]) -> Message[Any]:
        offered = self._offered()
        if offered is None:
            return Message(protocol.NoAnswerYet(wait=True))
        data, description = offered
        tasks = [TaskToRead(task_from(each.task), each.ends) for each in call.head.tasks]
        for task, _ in tasks:
            self._check(task)
        session = call.caller.session
        to = call.head.to
        parts = SentParts(tuple(call.head.ids), None if to is None else SendTo(to.worker, to.name))
        known, reading = self._readings.get(session, (None, None))
        if reading is None or known != parts or not reading.extend(tasks):
            self._drop(session)
            reading = self._begin(session, data, description, parts)
            reading.extend(tasks)
        taken = reading.take(_WAIT)
        if taken is None:
            return Message(protocol.NoAnswerYet(wait=True))
        if isinstance(taken, ReadFailure):
            self._drop(session)
            return self._failure(taken)
        return taken.message

    def _check(self, task: Task) -> None:
        records = self._records.get(task.path)
        if records is None or task.first + task.records > records or not len(places_of(task)):
            raise RefusedError(
                f"expected a task with unread records, got {task}: {task.done} are done, and there is "
                f"{'no such file' if records is None else f'{records} records in the file'}."
            )

    def _begin(
        self, session: str, data: SharedData, description: DataDescription, parts: SentParts
    ) -> TaskReading:
        packer = _Packer(self._ids, parts, description.digest)
        reading = TaskReading(data, packer, alone=parts.to is not None)
        with self._changed:
            if self._closed:
                reading.close()
                raise RefusedError("expected to be running, but it is closed.")
            gone = [name for name, (_, each) in self._readings.items() if each.over]
            for name in gone:
                del self._readings[name]
            self._readings[session] = parts, reading
        return reading

    def _drop(self, session: str) -> None:
        with self._changed:
            _, reading = self._readings.pop(session, (None, None))
        if reading is not None:
            reading.close()

    def _failure(self, failure: ReadFailure) -> Message[protocol.FailedTask]:
        error, code = failure.error, code_of(failure.error)
        self.note_failure(error)
        text = f"{type(error).__name__}: {error}"
        if code in _KINDS:
            _log.error("%s could not read a task: %s", self.name, text_of(error))
        else:
            _log.error("%s could not read a task", self.name, exc_info=error)
        kind = _KINDS.get(code, "failed")
        return Message(protocol.FailedTask(failed=text[:20_000], task=failure.task, kind=kind))


class _Packer(BatchPacker):
    """Packs the batches of tasks; `digest` is that of the data."""

    def __init__(self, ids: TaskIds, parts: SentParts, digest: str) -> None:
        self._ids = ids
        self._parts = parts
        self._digest = digest

    @override
    def pack(self, batch: Batch, records: int, closed: Callable[[], bool]) -> ReadBatch:
        batch, reference = self._ids.send(batch, self._parts.ids, self._parts.to, closed)
        made = pack(batch)
        head = protocol.TaskBatch(**made.head, records=records, samples=batch.samples, digest=self._digest)
        return ReadBatch(Message(head, made.arrays), records, reference)

    @override
    def drop(self, batches: Sequence[ReadBatch]) -> None:
        if self._parts.to is None:  # otherwise the batch is that of a trainer, which waits for it
            self._ids.forget(each.ids for each in batches if each.ids is not None)
