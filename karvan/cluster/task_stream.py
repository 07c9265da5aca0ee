"""`LoadedData`: data whose records trainers lease, and the loaders of the job read.

A trainer has several `TaskStream`s, each of which takes the batches of some tasks, in order. A stream asks
one loader at a time, and one batch after the other. Its own loader is asked first. If that is lost, the
stream asks the next one for the same tasks, and returns to its own when it is back.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import numpy as np

from karvan import distributed
from karvan.activity import activity
from karvan.clock import clock
from karvan.cluster.batch_messages import unpack
from karvan.cluster.loader.service import ask_loaders, require_ids
from karvan.cluster.loader_access import (
    BatchStream,
    LoaderAccess,
    LoaderConnection,
    LoaderLostError,
    ask,
    ask_all,
    read_batch,
    waiting_for,
)
from karvan.data.identity import Identity
from karvan.data.leased_data import LeasedTasks, planned_numbers, planned_records
from karvan.data.loading.pipeline import Order
from karvan.data.source import Split
from karvan.data.task_records import SearchResult, TakenRecords, TaskToRead, places_of, rest_of, search_with
from karvan.data.work_client import WorkClient
from karvan.errors import mark
from karvan.job.environment import JobEnvironment
from karvan.protocol import loader as protocol
from karvan.protocol.loader import DESCRIBE, STATISTICS, Description, NoAnswerYet
from karvan.ragged import REFERENCE, Batch, IdsReference
from karvan.wire import Message, WireError
from karvan.work.task import TaskPlan, WorkSpec

_log = logging.getLogger("karvan.cluster")

# Finds the record that makes a batch raise an error, where loaders read the records.


class LoadedRecordSearch:
    """A search by loaders: any loader reads the records again, as tasks that skip all others."""

    def __init__(self, access: LoaderAccess, seed: int | None) -> None:
        self._requests = TaskRequests(access)
        self._seed = seed

    def find(
        self, suspects: Sequence[TakenRecords], checks: Sequence[Callable[[Batch], None]] = ()
    ) -> SearchResult:
        """The record among these that raises an error; checks: tried in turn until one finds it."""

        def use(check: Callable[[Batch], None]) -> Callable[[Order], None]:
            return lambda few: self._try(_tasks_of(suspects, few), check)

        return search_with(checks, suspects, self._seed, use)

    def _try(self, remaining: list[TaskToRead], check: Callable[[Batch], None]) -> None:
        while remaining:
            loader, answer = read_batch(self._requests.access, self._requests.head(remaining))
            if isinstance(answer.head, protocol.FailedTask):
                raise reading_error(loader, answer.head)
            batch = Batch.trusted(dict(unpack(answer.head.batch, answer.arrays)), answer.head.samples)
            if batch.samples:  # a transform may drop records
                check(batch)
            remaining = rest_of(remaining, answer.head.records)


def reading_error(loader: int, failure: protocol.FailedTask) -> RuntimeError:
    """The error of a loader that could not read a task."""
    error = RuntimeError(f"loader {loader}: {failure.failed}")
    return error if failure.kind == "failed" else mark(error, failure.kind == "temporary")


def _tasks_of(suspects: Sequence[TakenRecords], few: Order) -> list[TaskToRead]:
    """Tasks that have only some of the suspects, by their indices among all."""
    tasks: list[TaskToRead] = []
    for lease, places, _ in suspects:
        mine = places[few[(few >= 0) & (few < len(places))]]
        few = few - len(places)
        if len(mine):
            others = np.setdiff1d(np.arange(lease.task.records), mine)
            task = lease.task._replace(done=0, skipped=tuple(map(int, others)))
            tasks.append(TaskToRead(task, ends=False))
    tasks[-1] = tasks[-1]._replace(ends=True)
    return tasks


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
    ids = batch.get(REFERENCE)
    if not isinstance(ids, IdsReference):
        return batch
    needed, rest = 0, records
    while rest > 0:
        rest -= len(places_of(tasks[needed].task))
        needed += 1
    reference = LeasedIds(ids, tasks[:needed])
    if (workers := distributed.current().workers) is not None:
        workers.watch(reference)
    return Batch.trusted({**batch, REFERENCE: reference}, batch.samples)


@dataclass(frozen=True)
class TaskRequests:
    """How a trainer asks loaders for the batches of tasks.

    ids: the features that embedding workers get. digest: what batches must say of their data. prefetch: how
    many batches a stream has in advance.
    """

    access: LoaderAccess
    ids: Sequence[str] = ()
    digest: str = ""
    prefetch: int = 1

    def head(
        self, tasks: Sequence[TaskToRead], to: protocol.IdsReceiver | None = None
    ) -> protocol.RequestedTasks:
        """The head of a call of `read_batch`; to: which embedding worker gets the ids, if it must be one."""
        sent: dict[str, Any] = {"ids": list(self.ids)} if self.ids else {}
        if to is not None:
            sent["to"] = to
        return protocol.RequestedTasks(
            tasks=[protocol.RequestedTask(task=task.task._asdict(), ends=task.ends) for task in tasks], **sent
        )

    def resend(self, reference: IdsReference) -> None:
        """Have a loader send the ids of a batch again; see `Workers.resend`."""
        assert isinstance(reference, LeasedIds)
        to = protocol.IdsReceiver(worker=reference.worker, name=reference.name)
        loader, answer = read_batch(self.access, self.head(reference.tasks, to))
        head = answer.head
        if isinstance(head, protocol.FailedTask):
            raise mark(reading_error(loader, head), temporary=True)  # it could be read before
        if head.digest != self.digest or head.samples != reference.rows:
            raise ValueError(
                f"loader {loader} expected to read the batch of {reference.tasks[0].task} again, with "
                f"{reference.rows} samples, as an embedding worker has lost its ids; got "
                f"{head.samples} samples, or other data. Do not change files while a job runs."
            )


# Where the tasks of a `TaskStream` come from: leases, or the plan of an epoch.


_TASKS = 2  # that are known in advance, so that a loader reads one while batches of the other are sent


class LeasedQueue:
    """Tasks of an epoch that are leased in the background, so much that the next two batches are known."""

    def __init__(self, client: WorkClient, epoch: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self._tasks = LeasedTasks(client, batch_size, tasks_ahead=1, epoch=epoch)
        self._changed = threading.Condition()
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._lease, name="karvan-leases", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to read for now."""
        return self._tasks.idle

    def left(self) -> list[TaskToRead]:
        """The tasks that were not received, each from its next record on; waits until they have a batch.

        Empty: the end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._has_batch())
            if self._error is not None:
                raise self._error
            return self._tasks.left()

    def take(self, records: int) -> list[TakenRecords]:
        """A batch of this many records was received: which ones of each task."""
        with self._changed:
            batch_tasks = self._tasks.take(records)
            self._changed.notify_all()
            return batch_tasks

    def suspects(self, task: int | None) -> list[TakenRecords]:
        """The records of the task that could not be read, by its index in `left`; None: of the next batch."""
        split = None
        if task is not None:
            failed = self._tasks.left()[task].task
            split = Split(failed.path, failed.first, failed.records)
        return self._tasks.suspects(split)

    def close(self) -> None:
        """Stop; no batch is taken any more."""
        self._tasks.close()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait after `close` until no task is leased any more."""
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
        waiting = self._tasks.left()
        return _records_of(waiting) >= self._batch_size or any(task.ends for task in waiting)

    def _has_enough(self) -> bool:
        waiting = self._tasks.left()
        return len(waiting) >= _TASKS and _records_of(waiting) >= 2 * self._batch_size


def _records_of(tasks: list[TaskToRead]) -> int:
    """How many records have to be read."""
    return sum(len(places_of(task.task)) if task.task.skipped else task.task.left for task in tasks)


class PlannedQueue:
    """Tasks of a plan, each of which is a batch, with their numbers in the epoch in place of tokens."""

    idle = False

    def __init__(self, tasks: Iterator[tuple[int, TaskToRead]]) -> None:
        self._tasks = tasks
        self._left: deque[tuple[int, TaskToRead]] = deque()
        self._closed = False

    def left(self) -> list[TaskToRead]:
        """The tasks that were not received; empty: the end."""
        while len(self._left) < 2 * _TASKS and (following := next(self._tasks, None)) is not None:
            self._left.append(following)
        return [] if self._closed else [task for _, task in self._left]

    def take(self, records: int) -> list[TakenRecords]:
        """A batch of this many records was received: those of the first task."""
        number, (task, _) = self._left.popleft()
        if records != task.left:
            raise RuntimeError(f"Expected a batch of {task.left} records, got one of {records}.")
        return planned_records(number, task)

    def suspects(self, task: int | None) -> list[TakenRecords]:
        """The records of the task that could not be read, by its index in `left`; None: of the next batch."""
        number, (failed, _) = self._left[task or 0]
        return planned_records(number, failed)

    def close(self) -> None:
        """Stop; there is no further task."""
        self._closed = True

    def join(self, seconds: float) -> None:
        """Nothing is leased."""


TaskQueue: TypeAlias = LeasedQueue | PlannedQueue

_RETURN_AFTER = 5.0  # seconds after which a stream tries its own loader again
_PAUSE = 0.2  # seconds after all loaders were lost


class TaskStream:
    """Takes batches in the background, up to `prefetch` of them, until its tasks have ended.

    loader: its own, modulo their number. changed: the lock of all that is public here, which is notified of
    every change.
    """

    def __init__(
        self, tasks: TaskQueue, requests: TaskRequests, loader: int, changed: threading.Condition
    ) -> None:
        self.tasks = tasks
        self.waiting: deque[tuple[Batch, list[TakenRecords]]] = deque()  # batches with their records
        self.ended = False
        self.error: BaseException | None = None
        self.suspects: list[TakenRecords] = []  # of which one may be the reason of the error
        self._requests = requests
        self._access = requests.access
        self._own = self._loader = loader % requests.access.count
        self._return_at = 0.0
        self._changed = changed
        self._closed = threading.Event()
        self._connection: LoaderConnection | None = None
        threading.Thread(target=self._run, name=f"karvan-stream {self._own}", daemon=True).start()

    def check(self, waited: float) -> None:
        """Raise the error that came after all batches, once these were taken."""
        if self.error is not None and not self.waiting:
            raise self.error

    def take(self) -> tuple[Batch, list[TakenRecords]]:
        """The next batch, which waits."""
        with self._changed:
            self._changed.notify_all()
            return self.waiting.popleft()

    def close(self) -> None:
        """End; the thread disconnects on its own."""
        self._closed.set()
        self.tasks.close()
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while tasks := self.tasks.left():
                answer = self._read(tasks)
                if answer is None:
                    return
                head, records = answer.head, answer.head.records
                received = Batch.trusted(dict(unpack(head.batch, answer.arrays)), head.samples)
                batch = with_tasks(received, tasks, records)
                with self._changed:
                    self.waiting.append((batch, self.tasks.take(records)))
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: self._closed.is_set() or len(self.waiting) < self._requests.prefetch
                    )
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
        losses, since, count = 0, clock.now(), self._access.count
        while not self._closed.is_set():
            if self._loader != self._own and clock.now() > self._return_at:
                self._change_to(self._own)
            try:
                return self._ask(tasks)
            except LoaderLostError as error:
                losses += 1
                since = clock.now() if losses == 1 else since
                if self._loader == self._own:
                    self._return_at = clock.now() + _RETURN_AFTER
                self._change_to((self._loader + 1) % count)
                _log.info("%s; loader %d is asked.", error, self._loader)
                if clock.now() - since > self._access.timeout:
                    raise WireError(
                        f"Expected one of {count} loaders to read {tasks[0].task} within "
                        f"{self._access.timeout:.0f} s, got: {error}."
                    ) from error
                if losses % count == 0:
                    self._closed.wait(_PAUSE)
        return None

    def _ask(self, tasks: list[TaskToRead]) -> Message[protocol.TaskBatch] | None:
        loader, head = self._loader, self._requests.head(tasks)
        connection = self._connection = self._connection or LoaderConnection(loader, self._access)

        def warn(seconds: float) -> None:
            _log.warning("No batch from loader %d for %.0f seconds: %s", loader, seconds, tasks[0].task)

        with waiting_for([loader], warn) as waited:
            while isinstance((answer := connection.call(protocol.READ_BATCH, head)).head, NoAnswerYet):
                waited()
                if self._closed.is_set():
                    return None
        return Message(self._checked(loader, answer.head), answer.arrays)

    def _change_to(self, loader: int) -> None:
        """Disconnect, and ask this loader from now on."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._loader = loader

    def _checked(self, loader: int, head: protocol.FailedTask | protocol.TaskBatch) -> protocol.TaskBatch:
        if isinstance(head, protocol.FailedTask):
            if head.kind != "temporary":
                self.suspects = self.tasks.suspects(head.task)
            raise reading_error(loader, head)
        if head.digest != self._requests.digest:
            raise ValueError(
                f"loader {loader} reads other data, or transforms it with other statistics, than when "
                "training started: its process was replaced, and files have changed since, or its engine "
                "was fitted again. Expected the same. Do not change files, and name the folder of "
                "checkpoints in the job (checkpoints), so that data.read of the loader program loads the "
                "statistics."
            )
        return head


_STOP_WITHIN = 1.0  # seconds


class LoadedBatches(BatchStream[TaskStream]):
    """Iterates once over the batches that a trainer gets of an epoch, until all streams have ended.

    Each stream reads tasks of its own queue, so one batch after the other is ready even if a loader is slow.
    in_turns: a batch of each stream in turns, so that the order is always the same; otherwise as they come.
    """

    errors_first = True

    def __init__(self, queues: Sequence[TaskQueue], requests: TaskRequests, *, in_turns: bool) -> None:
        super().__init__()
        self._in_turns = in_turns
        self._records: list[TakenRecords] = []
        first = JobEnvironment.read().index * len(queues)  # trainers begin with different loaders
        self._streams = [
            TaskStream(queue, requests, first + number, self._changed) for number, queue in enumerate(queues)
        ]

    def __iter__(self) -> Iterator[Batch]:
        streams = deque(self._streams)
        while ready := self._ready([streams[0]] if self._in_turns else streams):
            activity.advance()
            batch, self._records = ready[0].take()
            streams.rotate(-1)
            yield batch

    @property
    def idle(self) -> bool:
        """Whether a batch may take long to come, because others work on the last records of the epoch."""
        with self._changed:
            return all(not stream.waiting and stream.tasks.idle for stream in self._streams)

    def hand_over(self) -> list[TakenRecords]:
        """The records of the last batch, for whoever acknowledges them."""
        return self._records

    def suspects(self, error: Exception) -> list[TakenRecords]:
        """The records of which one may be the reason that the next batch raised this error."""
        return next((stream.suspects for stream in self._streams if stream.error is error), [])

    def stop(self) -> None:
        """End the streams; leases stay."""
        self._closed = True
        for stream in self._streams:
            stream.close()
        due = clock.now() + _STOP_WITHIN
        for stream in self._streams:
            stream.tasks.join(max(0.0, due - clock.now()))


_LEAST_STREAMS = 2  # so that one batch is unpacked while another is sent, by the same loader or another one


class LoadedData:
    """The data of the job's loaders; prefetch: batches of each stream in advance.

    `kv.data.from_loaders()` gives it in the trainers of a job with `sharding: dynamic`. A trainer is the
    holder of its leases, as with `SharedData`, and sends each task to a loader to be read. What it has to
    know of the data, it asks the loaders.

    ids: the features that embedding workers look up; a job that has workers must name them.
    """

    def __init__(self, access: LoaderAccess, prefetch: int, ids: Sequence[str] | None = None) -> None:
        require_ids(ids)
        self._access = access
        self._prefetch = prefetch
        self._ids = list(ids or ())
        self._identity: Identity | None = None

    @property
    def records(self) -> int:
        """How many records an epoch has."""
        return sum(records for _, records in self._description.parts)

    @property
    def batch_size(self) -> int:
        """How many records a batch has."""
        return self._description.batch_size

    def identity(self) -> Identity:
        """Distinguishes this data from other data."""
        return self._identity or Identity.from_state(self._description.identity)

    def call_data(self, name: str) -> None:
        """Give the data a name, which is its identity from now on."""
        self._identity = Identity.named(name, self.identity().files)

    def spec(self, most_tries: int = 3, skip_bad_records: int = 0) -> WorkSpec:
        """The work, as the master needs to know it."""
        data = self._description
        work = WorkSpec(tuple(data.parts), data.records_per_task, data.seed, epochs=None)
        return replace(work, most_tries=most_tries, skip_bad_records=skip_bad_records)

    def transform_states(self) -> dict[str, Any]:
        """The statistics of the loaders' transforms, by name; a Trainer saves them in checkpoints.

        Loaders with different statistics are an error, also later, when one is replaced.
        """
        return ask_loaders(
            lambda loader, whole: ask(self._access, loader, STATISTICS, whole), list(self._descriptions)
        )[0]

    def lease(self, client: WorkClient, epoch: int) -> LoadedBatches:
        """The batches of an epoch that this process leases, as they are ready."""
        group = distributed.current().group
        count = self._streams(1 if group is None else group.world_size)
        size = self.batch_size
        return self._batches([LeasedQueue(client, epoch, size) for _ in range(count)], in_turns=False)

    def search(self) -> LoadedRecordSearch:
        """Finds bad records of leased tasks."""
        return LoadedRecordSearch(self._access, self._description.seed)

    def plan(self) -> TaskPlan:
        """The batches of every epoch, each a task, where steps have fixed batches."""
        data = self._description
        return TaskPlan(tuple(data.parts), data.batch_size, seed=data.seed)

    def planned(
        self, plan: TaskPlan, *, epoch: int, first: int, rank: int, ranks: int, of_step: int
    ) -> LoadedBatches:
        """The batches of an epoch that one of `ranks` trainers computes, in order; see `PlannedLoader`."""
        count = self._streams(ranks)

        def tasks(stream: int) -> Iterator[tuple[int, TaskToRead]]:
            mine = planned_numbers(plan, first=first, rank=rank, ranks=ranks, of_step=of_step)
            for number in itertools.islice(mine, stream, None, count):
                yield number, TaskToRead(plan.task(epoch, number), ends=True)

        return self._batches([PlannedQueue(tasks(stream)) for stream in range(count)], in_turns=True)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "The loaders of a job with sharding: dynamic read what Trainer.fit leases, so their data cannot "
            "be iterated or evaluated: expected kv.data.read(…) for an evaluation or a loop of your own."
        )

    def _streams(self, trainers: int) -> int:
        """How many streams each trainer has, so that together they ask all loaders."""
        return max(_LEAST_STREAMS, -(-self._access.count // trainers))

    def _batches(self, queues: Sequence[TaskQueue], *, in_turns: bool) -> LoadedBatches:
        requests = TaskRequests(self._access, self._ids, self._description.digest, self._prefetch)
        if (workers := distributed.current().workers) is not None:
            workers.resend = requests.resend
        return LoadedBatches(queues, requests, in_turns=in_turns)

    @property
    def _description(self) -> Description:
        return next(iter(self._descriptions.values()))

    @cached_property
    def _descriptions(self) -> dict[int, Description]:
        """The data, which is the same, as each loader describes it; others are lost for now."""
        answers = ask_all(self._access, DESCRIBE)
        descriptions = {loader: answer.head for loader, answer in answers.items()}
        first = min(descriptions)
        names = {"parts": "files", "identity": "content of the files"}
        for loader, description in descriptions.items():
            for name in ("parts", "batch_size", "seed", "records_per_task", "identity"):
                if getattr(descriptions[first], name) != getattr(description, name):
                    raise ValueError(
                        f"loader {first} and loader {loader} read data with different "
                        f"{names.get(name, name)}: expected the same in all loaders, since any of them reads "
                        "what trainers have leased."
                    )
        return descriptions
