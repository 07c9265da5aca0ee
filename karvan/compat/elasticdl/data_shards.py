"""Elastic data shards: runs of record numbers that workers lease from a master while they train.

    service = build_data_shard_service(batch_size=32, num_epochs=2, dataset_size=len(images))
    while (shard := service.fetch_shard()) is not None:
        for number in shard.numbers():
            ...
        service.report_batch_done(len(shard.numbers()))

The tasks are those of `kv.data.elastic`: `karvan role master --port 12345 --checkpoints FOLDER` leases them,
and MASTER_ADDR=127.0.0.1:12345 says where it is. **A worker dies**: the records that it has not reported are
leased by others. **The master dies**: workers wait until it is back. Epochs do not overlap: the first shard
of an epoch comes when all records of the one before are reported, by whomever.

**Workers of a DataLoader** are forked, and have no connection. They ask the process that trains for the
records of their batches (`_LoaderRequests`), which gives them out in the order in which the DataLoader
delivers the batches: so the batch that is reported next is the one that was trained. If the program leaves
the DataLoader before its end, what it has prefetched is given out again.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple, NoReturn

import numpy.random  # noqa: F401  # a forked worker of a DataLoader cannot import it while threads import
from torch.utils.data import get_worker_info

from karvan.argument_checks import check_counts
from karvan.clock import clock
from karvan.compat.elasticdl.common import MINIBATCHES_PER_TASK, NUM_EPOCHS, TaskType
from karvan.compat.unsupported import UnsupportedError, UsageError
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.task_records import numbers_of, places_of
from karvan.job.address import MasterAddress
from karvan.job.environment import JobEnvironment
from karvan.process_end import first_at_exit, not_at_exit
from karvan.torch_internals import is_leaving_loader, loader_batch
from karvan.wire import Security
from karvan.work.ledger import NoTask
from karvan.work.task import TaskLease, WorkSpec, holder_of

# What a worker of a DataLoader has inherited belongs to its parent: it must not collect connections there.
os.register_at_fork(after_in_child=gc.freeze)

_log = logging.getLogger("karvan.data")

_POLL = 0.1  # seconds between two questions for a shard while others work on the last ones of an epoch
_PARENT = 1.0  # seconds between two looks of a DataLoader's worker at whether the process that trains lives


@dataclass(frozen=True)
class Shard:
    """Records `start` to `end`; `indices` are their numbers in the order to train them, if it is another."""

    name: str
    start: int
    end: int
    indices: list[int] | None = None

    def numbers(self) -> list[int]:
        """The numbers of the records, in the order to train them."""
        return list(range(self.start, self.end)) if self.indices is None else self.indices


class ShardTask(NamedTuple):
    """A shard and its number at the master; when all epochs are done, the type is NONE and it is empty."""

    task_id: int
    shard: Shard
    type: str = TaskType.TRAINING


class Record(NamedTuple):
    """A record of a leased task; done: how many records of the task are done with it."""

    number: int
    token: int
    done: int
    last: bool


RecordBatch = list[Record | None]
"""The records of a batch that was handed out; None: a record that fills it up."""


class DataShardService:
    """Leases shards of a data set of `dataset_size` records.

    A shard has batch_size * num_minibatches_per_shard records. shuffle: records inside of shards are
    shuffled, and so are shards; shuffle_shards: shards alone. num_epochs, num_minibatches_per_shard: without
    them those of the job, --num_epochs (1) and --num_minibatches_per_task (8). master: its address, by
    default MASTER_ADDR, or KARVAN_REGISTRY. All workers must describe the same work.
    """

    def __init__(
        self,
        batch_size: int,
        num_epochs: int | None = None,
        dataset_size: int | None = None,
        shuffle: bool = False,
        shuffle_shards: bool = False,
        task_type: str = TaskType.TRAINING,
        num_minibatches_per_shard: int = 0,
        dataset_name: str | None = None,
        *,
        seed: int = 0,
        master: str | None = None,
    ) -> None:
        if dataset_size is None:
            raise UsageError("Data shards need dataset_size, the number of records, got none.")
        if task_type != TaskType.TRAINING:
            raise UnsupportedError(f"task_type={task_type}", "shards are leased for training; read others.")
        check_counts(1, batch_size=batch_size, num_epochs=num_epochs, dataset_size=dataset_size)
        check_counts(0, num_minibatches_per_shard=num_minibatches_per_shard)
        self.batch_size = batch_size
        self.dataset_size = dataset_size
        epochs = int(os.environ.get(NUM_EPOCHS, 1)) if num_epochs is None else num_epochs
        self.num_epochs = epochs if epochs > 0 else None
        """None: without an end."""
        self.while_waiting: Callable[[], None] = lambda: clock.sleep(_POLL)
        """What to do while others work on the last shards of an epoch."""
        self._process = os.getpid()
        self._seed = seed if shuffle else None
        self._lock = threading.RLock()
        self._handed: deque[RecordBatch] = deque()  # handed out and not reported, in the order of training
        self._open: deque[Record] = deque()  # leased and not handed out
        self._tasks: dict[int, ShardTask] = {}  # that are not done, by token
        self._batch: deque[int] = deque()  # records of the last batch which are fetched one by one
        self._client = WorkClient(_master(master), _holder(), Security.from_environment())
        minibatches = num_minibatches_per_shard or int(os.environ.get(MINIBATCHES_PER_TASK, 8))
        order = seed if shuffle or shuffle_shards else None
        parts = ((dataset_name or "dataset", dataset_size),)
        self._client.open(WorkSpec(parts, batch_size * minibatches, order, self.num_epochs))
        self._loader = _LoaderBatches(self)

    def fetch_shard(self) -> Shard | None:
        """The next shard; None when all epochs are done. It waits for shards that others may return."""
        task = self.get_task()
        return task.shard if task.type == TaskType.TRAINING else None

    def get_task(self, task_type: str | None = None) -> ShardTask:
        """The task of the next shard; see `fetch_shard`."""
        if task_type not in (None, TaskType.TRAINING):
            raise UnsupportedError(f"get_task({task_type})", "shards are leased for training.")
        self._require_process()
        while (lease := self._lease()) is NoTask.WAIT:
            self._wait()
        if not isinstance(lease, TaskLease):
            return ShardTask(0, Shard("", 0, 0), TaskType.NONE)
        with self._lock:
            self._handed.append(list(self._records(lease)))
        return self._tasks[lease.token]

    def get_current_task(self) -> ShardTask | None:
        """The task of the oldest record that is not reported; None before the first one is fetched."""
        with self._lock:
            records = [record for batch in self._handed for record in batch if record is not None]
            return self._tasks.get(records[0].token) if records else None

    def fetch_record_index(self) -> int:
        """The number of the next record; StopIteration when all epochs are done.

        Batches do not span epochs: the last one of an epoch is filled up with its own records, as the
        DistributedSampler of torch does. Those do not count when it is reported. Batches have `batch_size`
        records, and in workers of a DataLoader those that it has.
        """
        if os.getpid() != self._process:
            return self._loader.requests.fetch()
        while not self._batch:
            got = self.next_batch(self.batch_size)
            if got is NoTask.DONE:
                raise StopIteration
            if got is NoTask.WAIT:
                self._wait()
            else:
                self._batch.extend(got)
        return self._batch.popleft()

    def record_index_gen(self) -> Iterator[int]:
        """The numbers of all records, as `fetch_record_index` gives them."""
        with suppress(StopIteration):
            while True:
                yield self.fetch_record_index()

    def report_batch_done(self, batch_size: int | None = None, err_msg: str = "") -> bool:
        """The oldest records that were fetched are trained, as many as a batch has; whether a shard is done.

        err_msg: they raised this error; their shard is tried again, by whomever, up to three times.
        """
        with self._lock:
            return self.report(self.take_batch(batch_size), err_msg)

    def take_batch(self, size: int | None = None) -> RecordBatch:
        """The oldest records that were fetched: one batch, or so many; they are to be reported."""
        with self._lock:
            if size is None:
                whole = self._loader.size > 1 and self._handed
                size = len(self._handed[0]) if whole else self.batch_size
            records: RecordBatch = []
            while self._handed and len(records) < size:
                batch = self._handed[0]
                part, batch[:] = batch[: size - len(records)], batch[size - len(records) :]
                records += part
                if not batch:
                    self._handed.popleft()
            if not self._handed and len(self._batch) <= records.count(None):
                self._batch.clear()  # a DataLoader's last batch is shorter: nobody fetches what fills it up
            return records

    def report(self, batch: Sequence[Record | None], err_msg: str = "") -> bool:
        """The records of batches that were taken are trained; see `report_batch_done`."""
        done: dict[int, int] = {}
        finished = False
        for record in batch:
            if record is None:
                continue
            if err_msg:
                self._fail(record.token, err_msg)
                return True
            done[record.token] = record.done
            if record.last:
                finished = True
                self._tasks.pop(record.token, None)
        if self._client.acknowledge(done):
            _log.warning(
                "Records of a batch were given to another worker: this one made no progress for too long."
            )
        return finished

    @property
    def records_to_train(self) -> int:
        """How many records the oldest batch has that was fetched, without those that fill it up."""
        with self._lock:
            oldest = self._handed[0] if self._handed else []
            return sum(record is not None for record in oldest)

    def prefetch(self) -> None:
        """Wait until there are records to train, if workers of a DataLoader wait for them.

        The process that trains calls this after a batch: it waits for the DataLoader otherwise, and can do
        nothing while others work on the last shards of an epoch.
        """
        while self._loader.size and not self._handed and not self._open:
            with self._lock:
                lease = self._lease()
                if isinstance(lease, TaskLease):
                    self._open.extend(self._records(lease))
            if lease is NoTask.DONE:
                return
            if lease is NoTask.WAIT:
                self.while_waiting()

    def get_minibatch_count_per_epoch(self) -> int:
        """How many whole batches an epoch has."""
        return self.dataset_size // self.batch_size

    def get_shard_checkpoint(self) -> str:
        """Which records are done, of all workers, as JSON."""
        return self._client.take_position()

    def restore_shard_from_checkpoint(self, shard_checkpoint: str) -> bool:
        """Return to a checkpoint of the shards; what workers have fetched is given out again."""
        self._client.restore_position(shard_checkpoint)
        with self._lock:
            self._handed.clear()
            self._open.clear()
            self._batch.clear()
        return True

    def reset_dataset(self) -> NoReturn:
        """An error: it says what to use."""
        raise UnsupportedError("reset_dataset", "num_epochs says how often the records are trained.")

    def get_current_epoch(self) -> NoReturn:
        """An error: it says what to use."""
        raise UnsupportedError("get_current_epoch of a service", "use the controller's.")

    def get_tf_dataset(self, *arguments: Any) -> NoReturn:
        """An error: it says what to use."""
        raise UnsupportedError("get_tf_dataset", "loops are written in PyTorch: use record_index_gen().")

    def close(self) -> None:
        """Give back what was not reported, and disconnect."""
        self._loader.close()
        self._client.close()

    def __reduce__(self) -> NoReturn:
        """An error: workers of a DataLoader that are spawned would have it without its process."""
        raise UsageError(
            "Data shards are leased by the process that trains, and workers of its DataLoader are forked "
            "from it, got workers that are spawned: expected multiprocessing_context='fork'."
        )

    def next_batch(self, size: int) -> list[int] | NoTask:
        """Hand out a batch of records of one epoch: their numbers, or why there are none now."""
        with self._lock:
            batch: RecordBatch = []
            numbers: list[int] = []
            while len(batch) < size:
                if self._open:
                    batch.append(self._open.popleft())
                    numbers.append(batch[-1].number)  # type: ignore[union-attr]
                    continue
                lease = self._lease()
                if isinstance(lease, TaskLease):
                    self._open.extend(self._records(lease))
                elif not batch:
                    return lease
                else:
                    filled = len(batch)
                    numbers += [numbers[place % filled] for place in range(filled, size)]
                    batch += [None] * (size - filled)
            self._handed.append(batch)
            return numbers

    def hand_out_again(self) -> None:
        """Nobody will train what was handed out and is not reported."""
        with self._lock:
            records = [record for batch in self._handed for record in batch if record is not None]
            self._open.extendleft(reversed(records))
            self._handed.clear()

    def _require_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                "Shards are leased by the process that trains, got one that was forked from it: workers of a "
                "DataLoader have fetch_record_index; for fetch_shard, give it num_workers=0."
            )

    def _wait(self) -> None:
        """Others work on the last records of an epoch."""
        if fetched := sum(map(len, self._handed)):
            raise UsageError(
                f"The epoch ends when all of its records are reported, but {fetched} that this worker has "
                "fetched are not: call report_batch_done for each batch before the next."
            )
        self.while_waiting()

    def _lease(self) -> TaskLease | NoTask:
        got = self._client.lease()
        if not isinstance(got, list):
            return got
        (lease,) = got
        numbers = [record.number for record in self._records(lease)]
        in_order = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        shard = Shard(lease.task.path, min(numbers), max(numbers) + 1, None if in_order else numbers)
        self._tasks[lease.token] = ShardTask(lease.token, shard)
        return lease

    def _records(self, lease: TaskLease) -> Iterator[Record]:
        """The records that are left of a task, in the order to train them."""
        task = lease.task
        places = places_of(task)
        after = [*places[1:].tolist(), task.records]
        numbers = numbers_of(task, places, self._seed).tolist()
        for number, done in zip(numbers, after, strict=True):
            yield Record(number, lease.token, done, done == task.records)

    def _fail(self, token: int, error: str) -> None:
        """Report a shard, and drop what is left of it here."""
        self._client.fail(token, error)
        self._tasks.pop(token, None)

        def is_of_others(record: Record | None) -> bool:
            return record is None or record.token != token

        with self._lock:
            self._open = deque(filter(is_of_others, self._open))
            if self._loader.size:  # which the DataLoader will deliver
                for batch in self._handed:
                    batch[:] = [record if is_of_others(record) else None for record in batch]
            else:
                shards = [list(filter(is_of_others, batch)) for batch in self._handed]
                self._handed = deque(filter(None, shards))


class _LoaderBatches:
    """Gives workers of a DataLoader their batches, in a thread of the process that trains.

    A worker says which batch it computes: the DataLoader numbers them in the order in which it delivers
    them. Those before it were given to other workers, and get their records first. A number that is not
    larger than the last one of this worker, or another seed, tells that the DataLoader begins again.
    """

    def __init__(self, service: DataShardService) -> None:
        self.size = 0
        """How many records a batch of the DataLoader has; 0 without one."""
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.requests = _LoaderRequests(theirs)
        self._service = service
        self._seed: int | None = None
        self._former_seeds: set[int] = set()
        self._iteration = 0
        self._workers: dict[int, tuple[int, int]] = {}  # iteration and last batch of each worker
        self._numbers: dict[int, list[int]] = {}  # records by batch, until its worker asks for them
        self._next = 0  # batch
        self._thread = threading.Thread(target=self._serve, name="karvan-loader-batches", daemon=True)
        self._thread.start()
        first_at_exit(self.close)

    def close(self) -> None:
        """End the thread; one that waits for the master ends when its client is closed."""
        not_at_exit(self.close)
        self.requests.close()
        self._thread.join(_POLL)

    def _serve(self) -> None:
        workers: list[Connection] = []
        while True:
            for ready in wait([self._door, *workers]):
                if isinstance(ready, Connection):
                    try:
                        self._reply(ready)
                    except (OSError, EOFError):  # the worker has ended
                        workers.remove(ready)
                        ready.close()
                    continue
                _, received, *_ = socket.recv_fds(self._door, 1, 1)
                if not received:
                    return
                workers.append(Connection(received[0]))

    def _reply(self, worker: Connection) -> None:
        process, *request = worker.recv()
        try:
            answer: Any = self._answer(*request)
            if answer is NoTask.WAIT and is_leaving_loader(process):
                answer = "The program has left the DataLoader."
        except Exception as error:  # the worker raises it, and the DataLoader where it is iterated
            answer = f"{type(error).__name__}: {error}"
        worker.send(answer)

    def _answer(self, worker: int, seed: int, batch: int, size: int) -> list[int] | NoTask:
        self.size = max(self.size, size)
        self._follow(worker, seed, batch)
        while self._next <= batch:
            got = self._service.next_batch(size if self._next == batch else self.size)
            if isinstance(got, NoTask):
                return got
            self._numbers[self._next] = got
            self._next += 1
        self._workers[worker] = (self._iteration, batch)
        return self._numbers.pop(batch)

    def _follow(self, worker: int, seed: int, batch: int) -> None:
        """Notice that the DataLoader begins again: it has dropped what it has not delivered."""
        iteration, last = self._workers.get(worker, (0, -1))
        if seed in self._former_seeds:
            raise UsageError(
                "Only the workers of one DataLoader at a time can fetch records, got workers of two."
            )
        if seed == self._seed and (batch > last or iteration < self._iteration):
            return
        if self._seed is not None and seed != self._seed:
            self._former_seeds.add(self._seed)
        self._seed = seed
        self._iteration += 1
        self._next = 0
        self._numbers.clear()
        self._service.hand_out_again()


class _LoaderRequests:
    """What a forked worker of a DataLoader has of the service: the records of its batches."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door  # where a worker hands in its connection
        self._connection: Connection | None = None
        self._samples: Any = None  # of the batch that is computed, as the DataLoader names them
        self._numbers: deque[int] = deque()  # of its records

    def fetch(self) -> int:
        """The number of the next record of the batch that this worker computes."""
        info, place = get_worker_info(), loader_batch()
        if info is None or place is None:
            raise UsageError(
                "Records are fetched by the process that trains and by workers of its DataLoader, got a "
                "process that is neither."
            )
        batch, samples = place
        size = len(samples) if isinstance(samples, Sequence) else 1
        if samples is not self._samples:
            if self._numbers:
                raise UsageError(
                    f"A sample of a DataLoader has one record, but {len(self._numbers)} of the last batch "
                    "were not fetched: call fetch_record_index once for each sample."
                )
            self._numbers.extend(self._ask(info.id, info.seed - info.id, batch, size))
            self._samples = samples
        if not self._numbers:
            raise UsageError(
                f"A sample of a DataLoader has one record, got more than {size} calls for a batch of {size}: "
                "call fetch_record_index once for each sample."
            )
        return self._numbers.popleft()

    def close(self) -> None:
        """End the thread of the process that trains."""
        with suppress(OSError):  # it has ended
            self._door.send(b"e")

    def _ask(self, *request: int) -> list[int]:
        if self._connection is None:
            self._connection, theirs = Pipe()
            socket.send_fds(self._door, [b"c"], [theirs.fileno()])
            theirs.close()
        while True:
            self._connection.send((os.getpid(), *request))
            answer = self._connection.recv()  # an EOFError if the process that trains has ended
            if isinstance(answer, list):
                return answer
            if answer is NoTask.DONE:
                raise StopIteration
            if answer is not NoTask.WAIT:
                raise RuntimeError(answer)
            clock.sleep(_POLL)


class RecordIndexService(DataShardService):
    """A `DataShardService` that is used by `fetch_record_index`; its arguments have another order."""

    def __init__(
        self,
        batch_size: int,
        num_epochs: int | None = None,
        dataset_size: int | None = None,
        task_type: str = TaskType.TRAINING,
        shuffle: bool = False,
        num_minibatches_per_shard: int = 0,
        dataset_name: str | None = None,
        **options: Any,
    ) -> None:
        size = num_minibatches_per_shard
        super().__init__(
            batch_size, num_epochs, dataset_size, shuffle, False, task_type, size, dataset_name, **options
        )


build_data_shard_service = DataShardService


def _master(master: str | None) -> str | MasterAddress:
    if master:
        return master
    job = JobEnvironment.read()
    if job.registry:
        return job.master
    address = os.environ.get("MASTER_ADDR", "")
    if ":" not in address:
        raise UsageError(
            "Data shards are leased from a master, but there is none: start one with `karvan role master "
            "--port 12345 --checkpoints FOLDER`, and set MASTER_ADDR=127.0.0.1:12345."
        )
    return address


def _holder() -> str:
    """A name that no other process has; the supervisor of a job knows whose it is."""
    job, part = JobEnvironment.read(), f"{os.getpid()} {secrets.token_hex(4)}"
    if job.role is not None and job.process:
        return holder_of(job.role, job.index, job.process, part)
    return f"{os.uname().nodename} {part}"
