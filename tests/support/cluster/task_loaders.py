"""Loaders that read leased tasks, and a master, in the test's own process."""

import itertools
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import torch

from karvan.cluster.loader.task_service import TaskService
from karvan.cluster.loader_access import LoaderAccess
from karvan.cluster.task_stream import LoadedData
from karvan.data.errors import DataError
from karvan.data.leased_data import SharedData
from karvan.data.loading.settings import ReadSettings
from karvan.data.source import Part
from karvan.data.work_client import WorkClient
from karvan.ragged import Batch
from karvan.wire import Security, Server, WireError
from karvan.work.service import WorkService

_holders = itertools.count()


class Numbers:
    """Parts of numbers: record i of part p is p * 1000 + i. Reading the `bad` number is an error."""

    schema = pa.schema([("id", pa.int64())])

    def __init__(self, counts, bad=None):
        self.counts = counts
        self.bad = bad

    def parts(self):
        return [Part(str(number), count) for number, count in enumerate(self.counts)]

    def read(self, split):
        first = int(split.path) * 1000 + split.first
        for begin in range(first, first + split.count, 7):
            ids = np.arange(begin, min(begin + 7, first + split.count))
            if self.bad in ids:
                raise DataError("A bad number.", path=split.path)
            yield pa.record_batch([pa.array(ids)], self.schema)

    def all(self):
        """Every record."""
        return [part * 1000 + number for part, count in enumerate(self.counts) for number in range(count)]


def decode(records):
    return Batch({"id": torch.from_numpy(records.column(0).to_numpy().copy())})


decode.row_wise = True


def shared_data(source, batch_size=4, seed=None, transform=None, records_per_task=None):
    settings = ReadSettings(
        source,
        decode,
        batch_size,
        shuffle=0 if seed is None else 1,
        seed=seed or 0,
        workers=1,
        prefetch=2,
        transform=transform,
        split_records=records_per_task,
        retry_seconds=5.0,
    )
    return SharedData(settings)


class TaskLoaders:
    """A master and loaders of the same data; `find` fails for one that is lost."""

    def __init__(self, folder, datas, statistics=None, workers=()):
        self.work = WorkService(folder / "ledger.db")
        self.master = Server(self.work)
        self.clients = []
        self.datas = datas
        self.workers = workers
        self.services, self.servers = {}, {}
        for index in range(len(datas)):
            self.start(index, statistics and statistics[index])

    def start(self, index, statistics=None):
        service = self.services[index] = TaskService(index, workers=self.workers)
        service.offer(self.datas[index], statistics)
        self.servers[index] = Server(service)

    def lose(self, index):
        self.servers.pop(index).close(0.1)
        self.services.pop(index).close()

    def find(self, index):
        if index not in self.servers:
            raise WireError(f"there is no loader {index} now")
        return self.servers[index].address

    def data(self, timeout=20.0, prefetch=2, ids=()):
        return LoadedData(self.access(timeout), prefetch, ids)

    def access(self, timeout=20.0):
        return LoaderAccess(len(self.datas), self.find, Security(), timeout)

    def client(self, spec):
        made = WorkClient(self.master.address, f"holder {next(_holders)}")
        made.open(spec)
        self.clients.append(made)
        return made

    def close(self):
        for client in self.clients:
            client.close()
        for index in list(self.servers):
            self.lose(index)
        self.master.close()
        self.work.close()


@contextmanager
def task_loaders(folder, *datas, **options):
    made = TaskLoaders(folder, datas, **options)
    try:
        yield made
    finally:
        made.close()
