"""`LoadedData`: data whose records trainers lease, and the loaders of the job read.

`kv.data.from_loaders()` gives it in the trainers of a job with `sharding: dynamic`. A trainer is the holder
of its leases, as with `SharedData`, and sends each task to a loader to be read. What it has to know of the
data, it asks the loaders.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from karvan import distributed
from karvan.activity import activity
from karvan.clock import clock
from karvan.cluster.loader.id_forwarding import require_ids
from karvan.cluster.loader.statistics import ask_loaders
from karvan.cluster.streams.loader_connection import LoaderAccess, ask_all, ask_one
from karvan.cluster.streams.task_stream import (
    LeasedQueue,
    LoadedRecordSearch,
    PlannedQueue,
    TaskStream,
    resender,
)
from karvan.data.identity import Identity
from karvan.data.leased_data import planned_numbers
from karvan.data.task_records import TakenRecords, TaskToRead
from karvan.data.work_client import WorkClient
from karvan.job.environment import JobEnvironment
from karvan.protocol.loader import DESCRIBE, STATISTICS, Description, Statistics, Whole
from karvan.ragged import Batch
from karvan.wire import Message
from karvan.work.task import TaskPlan, WorkSpec

# The batches of an epoch that a trainer gets from loaders: of the tasks that it leases, or of a plan.
#
# Several streams read at the same time, each of tasks of its own. So one batch after the other is ready, even
# if a loader is slow.


_WAKE = 1.0  # seconds
_STOP_WITHIN = 1.0  # seconds


class LoadedBatches:
    """Iterates once over the batches of streams, until all have ended.

    in_turns: a batch of each stream in turns, so that the order is always the same; otherwise as they come.
    """

    def __init__(
        self, streams: Sequence[TaskStream], changed: threading.Condition, *, in_turns: bool
    ) -> None:
        self._streams = streams
        self._changed = changed
        self._in_turns = in_turns
        self._closed = False
        self._records: list[TakenRecords] = []

    def __iter__(self) -> Iterator[Batch]:
        count = len(self._streams)
        for number in itertools.count():
            turn = number % count
            candidates = 1 if self._in_turns else count
            received = self._take([self._streams[(turn + offset) % count] for offset in range(candidates)])
            if received is None:
                return
            activity.advance()
            batch, self._records = received
            yield batch

    @property
    def idle(self) -> bool:
        """Whether a batch may take long to come, because others work on the last records of the epoch."""
        with self._changed:
            return all(not stream.ready and stream.tasks.idle for stream in self._streams)

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

    def _take(self, streams: Sequence[TaskStream]) -> tuple[Batch, list[TakenRecords]] | None:
        """The next batch of one of these streams; None if all of them have ended."""
        with self._changed:
            while not self._closed:
                for stream in streams:
                    if stream.error is not None and not stream.ready:
                        raise stream.error
                for stream in streams:
                    if stream.ready:
                        batch = stream.ready.popleft()
                        self._changed.notify_all()
                        return batch
                if all(stream.ended for stream in streams):
                    return None
                self._changed.wait(_WAKE)
            return None


_LEAST_STREAMS = 2  # so that one batch is unpacked while another is sent, by the same loader or another one


class LoadedData:
    """The data of the job's loaders; prefetch: batches of each stream in advance.

    ids: the features that embedding workers look up; a job that has workers must name them.
    """

    def __init__(self, access: LoaderAccess, prefetch: int, ids: Sequence[str] | None = None) -> None:
        require_ids(ids)
        self._access = access
        self._prefetch = prefetch
        self._ids = list(ids or ())
        self._known: tuple[Description, list[int]] | None = None
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
        _, loaders = self._described()

        def ask(loader: int, whole: bool) -> Message[Statistics]:
            return ask_one(self._access, loader, STATISTICS, Whole(whole=whole))

        return ask_loaders(ask, loaders)[0]

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

    def _batches(self, queues: Sequence[LeasedQueue | PlannedQueue], *, in_turns: bool) -> LoadedBatches:
        digest = self._description.digest
        if (workers := distributed.current().workers) is not None:
            workers.resend = resender(self._access, self._ids, digest)
        changed = threading.Condition()
        first = JobEnvironment.read().index * len(queues)  # trainers begin with different loaders
        streams = [
            TaskStream(queue, self._access, first + number, self._ids, digest, self._prefetch, changed)
            for number, queue in enumerate(queues)
        ]
        return LoadedBatches(streams, changed, in_turns=in_turns)

    @property
    def _description(self) -> Description:
        return self._described()[0]

    def _described(self) -> tuple[Description, list[int]]:
        """The data as loaders describe it, and which of them have; others are lost for now."""
        if self._known is None:
            descriptions = {loader: answer.head for loader, answer in ask_all(self._access, DESCRIBE).items()}
            first = min(descriptions)
            for loader, description in descriptions.items():
                if difference := _difference(descriptions[first], description):
                    raise ValueError(
                        f"loader {first} and loader {loader} read data with different {difference}: expected "
                        "the same in all loaders, since any of them reads what trainers have leased."
                    )
            self._known = descriptions[first], sorted(descriptions)
        return self._known


def _difference(first: Description, other: Description) -> str:
    """What differs in the data of two loaders, in words; empty if nothing does."""
    names = {"parts": "files", "identity": "content of the files"}
    compared = ("parts", "batch_size", "seed", "records_per_task", "identity")
    differ = (name for name in compared if getattr(first, name) != getattr(other, name))
    return next((names.get(name, name) for name in differ), "")
