"""`ElasticDataset`: leased batches for a plain loop with torch's `DataLoader`, in any number of processes.

Every process that iterates, a worker of a `DataLoader` included, leases tasks under a name of its own. A
batch knows its records, so that the process that trains on it can acknowledge them, wherever it was read.

At the end of an epoch a process waits until all records of the epoch are acknowledged. Workers of one
`DataLoader` would wait for each other without end if it gave their batches in turns: one waits for records
whose batches the `DataLoader` holds back, because it is the turn of the one that waits. With
`in_order=False` it holds nothing back.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from pyarrow import fs

from karvan.argument_checks import check_counts
from karvan.data.columns.declarations import Column
from karvan.data.leased_data import LeasedBatch, LeasedLoader, LeasedTasks
from karvan.data.loading.rank_shares import default_split_records
from karvan.data.loading.settings import ReadSettings, Transform
from karvan.data.read import open_data
from karvan.data.retry import RETRY_SECONDS
from karvan.data.task_records import BatchError, RecordSearch, blaming, named_error, records_done, report
from karvan.data.work_client import WorkClient
from karvan.job.address import MasterAddress
from karvan.job.environment import JobEnvironment
from karvan.wire import Security
from karvan.work.task import WorkSpec, holder_of

_log = logging.getLogger("karvan.data")


class ElasticDataset(torch.utils.data.IterableDataset[LeasedBatch]):
    """The batches that this process leases from the master of its job; see `elastic`."""

    def __init__(
        self,
        data: Any,
        *,
        master: str | MasterAddress,
        seed: int | None,
        open_arguments: Mapping[str, Any],
        read_arguments: Mapping[str, Any],
        work: Mapping[str, Any],
    ) -> None:
        self._data = data
        self._master = master
        self._seed = seed
        self._open_arguments = dict(open_arguments)
        self._read_arguments = dict(read_arguments)
        self._work = dict(work)
        self._client: tuple[int, WorkClient] | None = None  # of the process that acknowledges
        self._process = os.getpid()

    def loader(self, num_workers: int = 0, **options: Any) -> torch.utils.data.DataLoader[LeasedBatch]:
        """A `DataLoader` of the batches, with what they need."""
        # In order, workers would wait for each other; and connections do not survive a fork.
        if num_workers:
            options = {"multiprocessing_context": "forkserver", "in_order": False, **options}
        return torch.utils.data.DataLoader(self, batch_size=None, num_workers=num_workers, **options)

    def __iter__(self) -> Iterator[LeasedBatch]:
        if os.getpid() != self._process:
            raise RuntimeError(
                "This process was forked from one with connections, which do not work here: give the "
                "DataLoader multiprocessing_context='forkserver' or 'spawn', or use dataset.loader()."
            )
        source, decode = open_data(self._data, **self._open_arguments)
        settings = ReadSettings(source, decode, **self._read_arguments)
        parts = settings.parts()
        size = settings.split_records or default_split_records(parts, 0, settings.group_records)
        client = self._connect()
        loader: LeasedLoader | None = None
        try:
            pairs = tuple((part.path, part.records) for part in parts)
            client.open(WorkSpec(pairs, size, self._seed, **self._work))
            loader = LeasedLoader(settings, LeasedTasks(client, settings.batch_size, self._seed))
            batches = iter(loader)
            while True:
                with blaming(loader.suspects):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield LeasedBatch.of(batch, records_done(loader.hand_over()))
        except BatchError as failed:
            self._fail(client, failed, RecordSearch(settings, self._seed))
        finally:
            # Leases stay: the batches may be acknowledged later, and the master takes back what is not.
            if loader is not None:
                loader.stop()
            client.disconnect()

    def _fail(self, client: WorkClient, failed: BatchError, search: RecordSearch) -> NoReturn:
        """Report that records cannot be read, and raise the error with their names."""
        error = failed.__cause__
        assert error is not None
        record = search.find(failed.records).record
        report(client, error, failed.records, record)
        if record is None:
            raise error
        raise named_error(error, failed.records, record) from error.__cause__

    def acknowledge(self, batch: LeasedBatch) -> bool:
        """The records of a batch have been trained, and of all batches before it that were read together.

        False, with a warning, if the master has given some of them to another process, because it heard
        nothing of this one for too long.
        """
        if not isinstance(batch, LeasedBatch):
            raise TypeError(
                f"acknowledge expects a batch as the dataset gave it, got {type(batch).__name__}. Give the "
                "DataLoader batch_size=None and no collate_fn that makes another batch of it."
            )
        if self._client is None or self._client[0] != os.getpid():
            self._client = (os.getpid(), self._connect())
        ended = self._client[1].acknowledge(batch.records)
        if ended:
            _log.warning(
                "Records of a batch were given to another process: this one made no progress for too long."
            )
        return not ended

    def _connect(self) -> WorkClient:
        job, part = JobEnvironment.read(), f"{os.getpid()} {secrets.token_hex(4)}"
        if job.role is not None and job.process:  # the master gives back its tasks if it dies
            holder = holder_of(job.role, job.index, job.process, part)
        else:
            holder = f"{os.uname().nodename} {part}"
        return WorkClient(self._master, holder, Security.from_environment())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process=os.getpid())  # in a worker that was spawned


def elastic(
    data: Any,
    batch_size: int,
    *,
    master: str | None = None,
    columns: Sequence[Column | str] | None = None,
    labels: Sequence[str] = (),
    format: str | None = None,
    filesystem: fs.FileSystem | None = None,
    options: Mapping[str, Any] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    epochs: int | None = 1,
    records_per_task: int | None = None,
    most_tries: int = 3,
    transform: Transform | None = None,
    workers: int = 1,
    prefetch: int = 4,
    retry_seconds: float = RETRY_SECONDS,
) -> ElasticDataset:
    """Lease batches from a master, in a loop of torch, in place of fixed shares.

    Any number of processes may run the loop, come and go. Together they acknowledge every record once in
    every epoch. What a process has not acknowledged when it dies is leased by others. `karvan role master`
    runs a master.

    The result's `loader(num_workers=2)` is a torch `DataLoader`; `acknowledge(batch)` says that a batch was
    trained. A program with workers needs `if __name__ == "__main__":`. All processes must describe the same
    work: the files, `shuffle`, `seed`, `epochs`, `records_per_task`, `most_tries`.

    Args:
        data: What to read, as of `kv.data.read`.
        batch_size: How many samples make a batch.
        master: The master's address; by default that of the environment, KARVAN_REGISTRY.
        columns: The columns to read, as of `kv.data.read`.
        labels: Columns in which a missing value is an error.
        format: The format of files.
        filesystem: A pyarrow file system that has the files.
        options: Options of the format.
        shuffle: Whether to mix the tasks, and the records inside of each.
        seed: The seed of the order.
        epochs: How often every record is leased; None for endlessly.
        records_per_task: How many records are leased at once; by default as many as are read at once.
        most_tries: How often a task may raise errors before the job fails.
        transform: A function of batches, such as a `kv.FeatureEngine`.
        workers: How many threads of each process read.
        prefetch: How many batches are prepared in advance.
        retry_seconds: How long an unreachable source is tried again.

    Returns:
        A torch IterableDataset.

    Raises:
        ValueError: There is no master.

    Example:
        >>> def main():
        ...     dataset = kv.data.elastic("clicks/*.parquet", 4096, epochs=2)
        ...     for batch in dataset.loader(num_workers=2):
        ...         ...  # train
        ...         dataset.acknowledge(batch)
    """
    check_counts(1, batch_size=batch_size, epochs=epochs, records_per_task=records_per_task)
    check_counts(1, most_tries=most_tries, workers=workers, prefetch=prefetch)
    job = JobEnvironment.read()
    if not (job.registry if master is None else master):
        raise ValueError(
            "kv.data.elastic leases its records from a master, but there is none: start one with `karvan "
            "role master --checkpoints FOLDER`, and pass its address as master=, or in KARVAN_REGISTRY."
        )
    open_arguments = {
        "columns": columns,
        "labels": labels,
        "format": format,
        "filesystem": filesystem,
        "options": options,
        "retry_seconds": retry_seconds,
    }
    read_arguments = {
        "batch_size": batch_size,
        "workers": workers,
        "prefetch": prefetch,
        "transform": transform,
        "split_records": records_per_task,
        "retry_seconds": retry_seconds,
    }
    return ElasticDataset(
        data,
        master=job.master if master is None else master,
        seed=seed if shuffle else None,
        open_arguments=open_arguments,
        read_arguments=read_arguments,
        work={"epochs": epochs, "most_tries": most_tries},
    )
