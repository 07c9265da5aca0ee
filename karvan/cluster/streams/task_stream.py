"""`TaskStream`: the batches of some tasks, in order, which loaders read.

A stream asks one loader at a time, and one batch after the other. Its own loader is asked first. If that is
lost, the stream asks the next one for the same tasks, and returns to its own when it is back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from karvan import distributed
from karvan.activity import activity
from karvan.clock import clock
from karvan.cluster.batch_messages import unpack
from karvan.cluster.streams.loader_connection import (
    LoaderAccess,
    LoaderConnection,
    LoaderLostError,
    read_batch,
)
from karvan.cluster.streams.task_queue import TaskQueue
from karvan.data.leasing.record_search import SearchResult, search_with
from karvan.data.leasing.task_records import TakenRecords, TaskToRead, after, places_of
from karvan.data.loading.read_jobs import Order
from karvan.outages import mark
from karvan.protocol import loader as protocol
from karvan.ragged import REFERENCE, Batch, IdsReference
from karvan.wire import Message, WireError

# Finds the record that makes a batch raise an error, where loaders read the records.


class LoadedRecordSearch:
    """A search by loaders: any loader reads the records again, as tasks that skip all others."""

    def __init__(self, access: LoaderAccess, seed: int | None) -> None:
        self._access = access
        self._seed = seed

    def find(
        self, suspects: Sequence[TakenRecords], checks: Sequence[Callable[[Batch], None]] = ()
    ) -> SearchResult:
        """The record among these that raises an error; checks: tried in turn until one finds it."""

        def use(check: Callable[[Batch], None]) -> Callable[[Order], None]:
            return lambda few: self._try(_tasks_of(suspects, few), check)

        return search_with(checks, suspects, self._seed, use)

    def _try(self, left: list[TaskToRead], check: Callable[[Batch], None]) -> None:
        while left:
            loader, answer = read_batch(self._access, tasks_head(left))
            if isinstance(answer.head, protocol.FailedTask):
                raise reading_error(loader, answer.head)
            batch = Batch.trusted(dict(unpack(answer.head.batch, answer.arrays)), answer.head.samples)
            if batch.samples:  # a transform may drop records
                check(batch)
            left = _rest(left, answer.head.records)


def tasks_head(
    tasks: Sequence[TaskToRead], ids: Sequence[str] = (), to: protocol.IdsReceiver | None = None
) -> protocol.RequestedTasks:
    """The head of a call of `read_batch`; ids: the features that embedding workers get; to: which one."""
    sent: dict[str, Any] = {"ids": list(ids)} if ids else {}
    if to is not None:
        sent["to"] = to
    return protocol.RequestedTasks(
        tasks=[protocol.RequestedTask(task=each.task._asdict(), ends=each.ends) for each in tasks], **sent
    )


def reading_error(loader: int, failure: protocol.FailedTask) -> RuntimeError:
    """The error of a loader that could not read a task."""
    error = RuntimeError(f"loader {loader}: {failure.failed}")
    return error if failure.kind == "failed" else mark(error, failure.kind == "temporary")


def _tasks_of(suspects: Sequence[TakenRecords], few: Order) -> list[TaskToRead]:
    """Tasks that have only some of the suspects, by their indices among all."""
    made: list[TaskToRead] = []
    for lease, places, _ in suspects:
        mine = places[few[(few >= 0) & (few < len(places))]]
        few = few - len(places)
        if len(mine):
            others = np.setdiff1d(np.arange(lease.task.records), mine)
            task = lease.task._replace(done=0, skipped=tuple(map(int, others)))
            made.append(TaskToRead(task, ends=False))
    made[-1] = made[-1]._replace(ends=True)
    return made


def _rest(tasks: Sequence[TaskToRead], records: int) -> list[TaskToRead]:
    """What is left of tasks after this many records."""
    left = list(tasks)
    while records:
        task, ends = left.pop(0)
        rest = after(task, records)
        records -= min(records, len(places_of(task)))
        if rest is not None:
            left.insert(0, TaskToRead(rest, ends))
    return left


# `LeasedIds`: refers to the ids of a batch of leased records, which any loader can send again.
#
# An embedding worker that is replaced has lost the ids of the batches that trainers have not finished.
# Loaders do not keep them either. But the reference knows the tasks of which its batch was the first one,
# and the same call has the same answer in every loader: one of them reads the batch once more, and sends its
# ids to the worker, under the same name.


class LeasedIds(IdsReference):
    """The reference of a batch that was the first one of these tasks."""

    __slots__ = ("tasks",)

    def __init__(self, reference: IdsReference, tasks: Sequence[TaskToRead]) -> None:
        super().__init__(reference.worker, reference.name, reference.rows)
        self.tasks = tasks


def with_tasks(batch: Batch, tasks: Sequence[TaskToRead], records: int) -> Batch:
    """A batch as the engines take it: a reference in it knows the tasks whose first `records` it has."""
    found = batch.get(REFERENCE)
    if not isinstance(found, IdsReference):
        return batch
    needed, left = 0, records
    while left > 0:
        left -= len(places_of(tasks[needed].task))
        needed += 1
    reference = LeasedIds(found, tasks[:needed])
    if (workers := distributed.current().workers) is not None:
        workers.watch(reference)
    return Batch.trusted({**batch, REFERENCE: reference}, batch.samples)


def resender(access: LoaderAccess, ids: Sequence[str], digest: str) -> Callable[[IdsReference], None]:
    """A function that has a loader send the ids of a batch again; see `Workers.resend`."""

    def resend(reference: IdsReference) -> None:
        assert isinstance(reference, LeasedIds)
        to = protocol.IdsReceiver(worker=reference.worker, name=reference.name)
        loader, answer = read_batch(access, tasks_head(reference.tasks, ids, to))
        head = answer.head
        if isinstance(head, protocol.FailedTask):
            raise mark(reading_error(loader, head), temporary=True)  # it could be read before
        if head.digest != digest or head.samples != reference.rows:
            raise ValueError(
                f"loader {loader} expected to read the batch of {reference.tasks[0].task} again, with "
                f"{reference.rows} samples, as an embedding worker has lost its ids; got "
                f"{head.samples} samples, or other data. Do not change files while a job runs."
            )

    return resend


_log = logging.getLogger("karvan.cluster")

_RETURN_AFTER = 5.0  # seconds after which a stream tries its own loader again
_PAUSE = 0.2  # seconds after all loaders were lost
_LONG = 60.0  # seconds without a batch after which a warning is logged


class ReceivedBatch(NamedTuple):
    """A batch, and its records of leased tasks."""

    batch: Batch
    records: list[TakenRecords]


class TaskStream:
    """Takes batches in the background, up to `prefetch` of them, until its tasks have ended.

    loader: its own. ids: the features that embedding workers get. digest: what batches must say of their
    data. changed: the lock of all that is public here, which is notified of every change.
    """

    def __init__(
        self,
        tasks: TaskQueue,
        access: LoaderAccess,
        loader: int,
        *,
        ids: Sequence[str] = (),
        digest: str,
        prefetch: int,
        changed: threading.Condition,
    ) -> None:
        self.ready: deque[ReceivedBatch] = deque()
        self.ended = False
        self.error: BaseException | None = None
        self.suspects: list[TakenRecords] = []  # of which one may be the reason of the error
        self._tasks = tasks
        self._access = access
        self._own = self._loader = loader
        self._return_at = 0.0
        self._ids = ids
        self._digest = digest
        self._prefetch = prefetch
        self._changed = changed
        self._closed = threading.Event()
        self._connection: LoaderConnection | None = None
        self._thread = threading.Thread(target=self._run, name=f"karvan-stream {loader}", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether it has no batch, and nothing to read for now."""
        return not self.ready and self._tasks.idle

    def join(self, seconds: float) -> None:
        """Wait after `close` until no task is leased any more."""
        self._tasks.join(seconds)

    def close(self) -> None:
        """End; the thread disconnects on its own."""
        self._closed.set()
        self._tasks.close()
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while tasks := self._tasks.left():
                answer = self._read(tasks)
                if answer is None:
                    return
                head, records = answer.head, answer.head.records
                received = Batch.trusted(dict(unpack(head.batch, answer.arrays)), head.samples)
                batch = with_tasks(received, tasks, records)
                with self._changed:
                    self.ready.append(ReceivedBatch(batch, self._tasks.take(records)))
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed.is_set() or len(self.ready) < self._prefetch)
        except BaseException as error:
            self.error = error
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()
            if self._connection is not None:
                self._connection.leave()

    def _read(self, tasks: list[TaskToRead]) -> Message[protocol.TaskBatch] | None:
        """The first batch of these tasks, by whichever loader; None after `close`."""
        losses, since = 0, clock.now()
        while not self._closed.is_set():
            loader = self._choose()
            try:
                return self._ask(loader, tasks)
            except LoaderLostError as error:
                losses += 1
                since = clock.now() if losses == 1 else since
                self._lose(error)
                if clock.now() - since > self._access.timeout:
                    raise WireError(
                        f"Expected one of {self._access.count} loaders to read {tasks[0].task} within "
                        f"{self._access.timeout:.0f} s, got: {error}."
                    ) from error
                if losses % self._access.count == 0:
                    self._closed.wait(_PAUSE)
        return None

    def _ask(self, loader: int, tasks: list[TaskToRead]) -> Message[protocol.TaskBatch] | None:
        head = tasks_head(tasks, self._ids)
        began = warn_at = clock.now()
        if self._connection is None:
            self._connection = LoaderConnection(loader, self._access)
        with activity.waiting(f"loader-{loader}"):
            while isinstance(
                (answer := self._connection.call(protocol.READ_BATCH, head)).head, protocol.NoAnswerYet
            ):
                if self._closed.is_set():
                    return None
                if clock.now() - warn_at > _LONG:
                    warn_at = clock.now()
                    seconds = clock.now() - began
                    _log.warning(
                        "No batch from loader %d for %.0f seconds: %s", loader, seconds, tasks[0].task
                    )
        return Message(self._checked(loader, answer.head), answer.arrays)

    def _choose(self) -> int:
        """The loader to ask."""
        if self._loader != self._own and clock.now() > self._return_at:
            self._disconnect()
            self._loader = self._own
        return self._loader

    def _lose(self, error: LoaderLostError) -> None:
        """Go to the next loader."""
        self._disconnect()
        if self._loader == self._own:
            self._return_at = clock.now() + _RETURN_AFTER
        self._loader = (self._loader + 1) % self._access.count
        _log.info("%s; loader %d is asked.", error, self._loader)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _checked(self, loader: int, head: protocol.FailedTask | protocol.TaskBatch) -> protocol.TaskBatch:
        if isinstance(head, protocol.FailedTask):
            if head.kind != "temporary":
                self.suspects = self._tasks.suspects(head.task)
            raise reading_error(loader, head)
        if head.digest != self._digest:
            raise ValueError(
                f"loader {loader} reads other data, or transforms it with other statistics, than when "
                "training started: its process was replaced, and files have changed since, or its engine "
                "was fitted again. Expected the same. Do not change files, and name the folder of "
                "checkpoints in the job (checkpoints), so that data.read of the loader program loads the "
                "statistics."
            )
        return head
