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
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from karvan.argument_checks import check_counts
from karvan.clock import clock
from karvan.compat.unsupported import UsageError
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.task_records import numbers_of, places_of
from karvan.job.environment import JobEnvironment
from karvan.job.master_address import MasterAddress
from karvan.wire import Security
from karvan.work.holders import holder_of
from karvan.work.ledger import NoTask
from karvan.work.spec import WorkSpec
from karvan.work.task import TaskLease

_log = logging.getLogger("karvan.data")

_POLL = 0.1  # seconds between two questions for a shard while others work on the last ones of an epoch


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


class _Fetched(NamedTuple):
    """A record that was handed out; done: how many records of its task are done with it."""

    token: int
    done: int
    last: bool


class DataShardService:
    """Leases shards of a data set of `dataset_size` records.

    A shard has batch_size * num_minibatches_per_shard records. shuffle: records inside of shards are
    shuffled, and so are shards; shuffle_shards: shards alone. num_epochs: None never ends. master: its
    address, by default MASTER_ADDR, or KARVAN_REGISTRY. All workers must describe the same work.
    """

    def __init__(
        self,
        batch_size: int,
        num_epochs: int | None = 1,
        dataset_size: int | None = None,
        shuffle: bool = False,
        shuffle_shards: bool = False,
        *,
        num_minibatches_per_shard: int = 8,
        dataset_name: str = "dataset",
        seed: int = 0,
        master: str | None = None,
    ) -> None:
        if dataset_size is None:
            raise UsageError("Data shards need dataset_size, the number of records, got none.")
        check_counts(1, batch_size=batch_size, num_epochs=num_epochs, dataset_size=dataset_size)
        check_counts(1, num_minibatches_per_shard=num_minibatches_per_shard)
        self.batch_size = batch_size
        self.while_waiting: Callable[[], None] = lambda: clock.sleep(_POLL)
        """What to do while others work on the last shards of an epoch."""
        self._process = os.getpid()
        self._seed = seed if shuffle else None
        self._pending: deque[_Fetched | None] = deque()  # handed out and not reported; None: to fill a batch
        self._open: deque[tuple[int, _Fetched]] = deque()  # records of a shard that are handed out one by one
        self._handed_out = 0  # records of the current batch, one by one
        self._batch: list[int] = []  # their numbers
        self._client = WorkClient(_master(master), _holder(), Security.from_environment())
        per_shard = batch_size * num_minibatches_per_shard
        order = seed if shuffle or shuffle_shards else None
        self._client.open(WorkSpec(((dataset_name, dataset_size),), per_shard, order, num_epochs))

    def fetch_shard(self) -> Shard | None:
        """The next shard; None when all epochs are done. It waits for shards that others may return."""
        lease = self._lease(wait=True)
        if not isinstance(lease, TaskLease):
            return None
        numbers, fetched = self._records(lease)
        self._pending.extend(fetched)
        return Shard(
            lease.task.path,
            min(numbers),
            max(numbers) + 1,
            None if numbers == list(range(numbers[0], numbers[0] + len(numbers))) else numbers,
        )

    def fetch_record_index(self) -> int:
        """The number of the next record; StopIteration when all epochs are done.

        Batches of `batch_size` records do not span epochs: the last one of an epoch is filled up with its
        own records, as the DistributedSampler of torch does. Those do not count when it is reported.
        """
        while not self._open:
            lease = self._lease(wait=not self._handed_out)
            if isinstance(lease, TaskLease):
                self._open.extend(zip(*self._records(lease), strict=True))
            elif self._handed_out:
                return self._fill_up()
            else:
                raise StopIteration
        number, fetched = self._open.popleft()
        self._pending.append(fetched)
        self._batch = [*(self._batch if self._handed_out else []), number]
        self._handed_out = (self._handed_out + 1) % self.batch_size
        return number

    def report_batch_done(self, batch_size: int | None = None, err_msg: str = "") -> bool:
        """The oldest records that were fetched are trained, as many as a batch has; whether a shard is done.

        err_msg: they raised this error; their shard is tried again, by whomever, up to three times.
        """
        done: dict[int, int] = {}
        finished = False
        for _ in range(min(self.batch_size if batch_size is None else batch_size, len(self._pending))):
            fetched = self._pending.popleft()
            if fetched is None:
                continue
            if err_msg:
                self._fail(fetched.token, err_msg)
                return True
            done[fetched.token] = fetched.done
            finished = finished or fetched.last
        if self._client.acknowledge(done):
            _log.warning(
                "Records of a batch were given to another worker: this one made no progress for too long."
            )
        return finished

    def close(self) -> None:
        """Give back what was not reported, and disconnect."""
        self._client.close()

    def _lease(self, *, wait: bool) -> TaskLease | NoTask:
        """One task, or why there is none: all are done, or, unless it waits, others work on the last ones."""
        if os.getpid() != self._process:
            raise UsageError(
                "Data shards are leased by the process that trains, got one that was forked from it: give "
                "the DataLoader num_workers=0."
            )
        while True:
            got = self._client.lease()
            if isinstance(got, list):
                return got[0]
            if got is NoTask.DONE or not wait:
                return got
            if self._pending:
                raise UsageError(
                    f"The epoch ends when all of its records are reported, but {len(self._pending)} that "
                    "this worker has fetched are not: call report_batch_done for each batch before the next."
                )
            self.while_waiting()

    def _records(self, lease: TaskLease) -> tuple[list[int], list[_Fetched]]:
        """The numbers of the records that are left of a task, and what is done with each of them."""
        task = lease.task
        places = places_of(task)
        after = [*places[1:].tolist(), task.records]
        last = [False] * (len(after) - 1) + [True]
        fetched = [_Fetched(lease.token, *each) for each in zip(after, last, strict=True)]
        return numbers_of(task, places, self._seed).tolist(), fetched

    def _fill_up(self) -> int:
        self._pending.append(None)
        number = self._batch[self._handed_out % len(self._batch)]
        self._handed_out = (self._handed_out + 1) % self.batch_size
        return number

    def _fail(self, token: int, error: str) -> None:
        """Report a shard, and drop what is left of it here."""
        self._client.fail(token, error)
        self._pending = deque(each for each in self._pending if each is None or each.token != token)
        self._open = deque(each for each in self._open if each[1].token != token)


class RecordIndexService(DataShardService):
    """A `DataShardService` that is used by `fetch_record_index`."""


def build_data_shard_service(
    batch_size: int,
    num_epochs: int | None = 1,
    dataset_size: int | None = None,
    shuffle: bool = False,
    shuffle_shards: bool = False,
    num_minibatches_per_shard: int = 8,
    dataset_name: str = "dataset",
) -> DataShardService:
    """See `DataShardService`."""
    return DataShardService(
        batch_size,
        num_epochs,
        dataset_size,
        shuffle,
        shuffle_shards,
        num_minibatches_per_shard=num_minibatches_per_shard,
        dataset_name=dataset_name,
    )


def _master(given: str | None) -> str | MasterAddress:
    if given:
        return given
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
