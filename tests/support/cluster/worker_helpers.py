"""Parameter servers and embedding workers as processes, and a loader that remembers what it has sent."""

import itertools
import os
import signal
import sys
import tempfile
import time
from subprocess import DEVNULL

import torch
from forked_programs import ForkedProgram
from free_ports import free_port

import karvan as kv
from karvan.cluster.embedding_worker.client import WorkerClient
from karvan.discovery.directory import Directory
from karvan.discovery.registry import Registry
from karvan.embedding import HashStack
from karvan.ragged import REFERENCE, Batch, IdsReference, IndexedRows, Padded, Ragged

_generations = itertools.count(1)


class Cluster:
    """A registry, some servers, and workers that can be killed and replaced."""

    def __init__(self, servers, workers, **environment):
        self.registry = Registry()
        self.directory = Directory(self.registry.address)
        self.servers, self.workers = servers, workers
        self._environment = {
            **os.environ,
            "KARVAN_REGISTRY": self.registry.address,
            "KARVAN_PARAMETER_SERVER_COUNT": str(servers),
            "KARVAN_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "KARVAN_CHECKPOINTS": tempfile.gettempdir(),
            **environment,
        }
        self._processes = {}
        for index in range(servers):
            self.start("parameter-server", index, servers)
        for index in range(workers):
            self.start("embedding-worker", index, workers)

    def start(self, role, index, count):
        arguments = [
            sys.executable,
            "-m",
            "karvan",
            "role",
            role,
            "--index",
            str(index),
            "--count",
            str(count),
        ]
        self._processes[role, index] = ForkedProgram(arguments, env=self._environment, stderr=DEVNULL)

    def wait(self):
        for role, count in (("parameter-server", self.servers), ("embedding-worker", self.workers)):
            for index in range(count):
                self.directory.find(role, index, 180)

    def replace(self, index, role="embedding-worker"):
        """Kill a process in the middle of what it does; another one takes its place."""
        process = self._processes[role, index]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.start(role, index, self.workers if role == "embedding-worker" else self.servers)

    def run_trainers(self, program, folder, world, *arguments):
        """Start a program so many times, as torch does, and wait for its end."""
        port = str(free_port())
        environment = {**self._environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        generation = self.next_generation()
        started = []
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            command = [sys.executable, str(program), *map(str, (folder, generation, *arguments))]
            started.append(ForkedProgram(command, env={**environment, **own}))
        try:
            while any(process.poll() is None for process in started):
                if (folder / "wanted").exists():  # the program wants the next generation
                    (folder / "wanted").unlink()
                    (folder / "begun").write_text(str(self.next_generation()))
                time.sleep(0.05)
            assert [process.wait() for process in started] == [0] * world
        finally:
            for process in started:
                process.kill()

    def connect(self, monkeypatch, workers=None, **options):
        """This process becomes a trainer, whose tables are empty."""
        monkeypatch.setenv("KARVAN_REGISTRY", self.registry.address)
        monkeypatch.setenv("KARVAN_PARAMETER_SERVER_COUNT", str(self.servers))
        monkeypatch.setenv("KARVAN_EMBEDDING_WORKER_COUNT", str(self.workers if workers is None else workers))
        monkeypatch.setenv("KARVAN_GENERATION", str(self.next_generation()))
        return kv.connect("remote", timeout=60, **options)

    def next_generation(self):
        """Begin the next generation, as a launcher does."""
        generation = next(_generations)
        self.registry.begin_generation(generation)
        return generation

    def client(self, worker):
        return WorkerClient(worker, lambda: self.directory.find("embedding-worker", worker, 5), deadline=60)

    def close(self):
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self.directory.close()
        self.registry.close()


class Loader:
    """Sends ids to workers, in turns, and again if somebody asks."""

    def __init__(self, cluster, workers, prefix):
        self.clients = [cluster.client(worker) for worker in range(workers)]
        self.kept = {}
        self.resent = 0
        self._prefix = prefix
        self._number = 0

    def serve(self, connection):
        connection.workers.resend = self.resend
        connection.workers.release = lambda reference: self.kept.pop(reference.name, None)
        return self

    def send(self, batch, ids=None):
        """The batch with a reference in place of its ids."""
        ids = {name: batch[name] for name in (ids or batch)}
        name, worker = f"{self._prefix} {self._number}", self._number % len(self.clients)
        self._number += 1
        rows = Batch(ids).samples
        self.kept[name] = ids
        self.clients[worker].put(name, ids)
        rest = {name: entry for name, entry in batch.items() if name not in ids}
        return Batch({**rest, REFERENCE: IdsReference(worker, name, rows)})

    def resend(self, reference):
        self.resent += 1
        self.clients[reference.worker].put(reference.name, self.kept[reference.name])

    def close(self):
        for client in self.clients:
            client.close()


def all_layouts():
    """A table of each kind."""
    return {
        "user": kv.Table(8),
        "mean": kv.Table(4, combiner="mean"),
        "weighted": kv.Table(4, combiner="sum", admit=kv.admission.MinCount(2)),
        "count": kv.Table(4, combiner="mean_by_count"),
        "plain tiles": kv.Table(4, name="count", combiner="tile", length=2, use_weights=False),
        "root": kv.Table(4, combiner="sqrtn"),
        "stack": kv.Table(4, hash_stack=HashStack(2, 10), combiner="mean"),
        "history": kv.Table(4, name="item", combiner="sequence"),
        "item": kv.Table(4),
        "padded": kv.Table(4, name="item", combiner="mean", padding_idx=3),
        "recent": kv.Table(4, name="item", combiner="sequence", length=3),
        "tiles": kv.Table(3, combiner="tile", length=2),
        "all": kv.Table(3, combiner="ragged"),
        "single": kv.Table(4, combiner="sequence", name="item"),
        "index": kv.Table(4, combiner="index", name="item"),
        "cut index": kv.Table(4, combiner="index", name="item", length=2),
        "weighted index": kv.Table(4, combiner="index", admit=kv.admission.MinCount(2)),
        "stacked index": kv.Table(4, combiner="index", hash_stack=HashStack(2, 10), length=3),
    }


def batches(number, rows=12, seed=3, keys=40):
    """Batches for `all_layouts`; some rows have no ids."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count):
        return torch.randint(-keys, keys, (count,), generator=generator)

    def ragged(weights=False):
        lengths = torch.randint(0, 5, (rows,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(offsets[-1])
        return Ragged(ids(count), offsets, torch.rand(count, generator=generator) if weights else None)

    return [
        {
            "user": ids(rows),
            "mean": ids(rows * 3).reshape(rows, 3),
            "weighted": ragged(weights=True),
            "count": ragged(weights=True),
            "plain tiles": ragged(weights=True),
            "root": ragged(),
            "stack": ragged(),
            "history": ragged(),
            "item": ids(rows).view(torch.uint64),
            "recent": ragged(),
            "tiles": ragged(),
            "all": ragged(),
            "single": ids(rows),
            "index": ragged(),
            "cut index": ids(rows * 3).reshape(rows, 3),
            "weighted index": ragged(weights=True),
            "stacked index": ids(rows),
            "padded": ids(rows * 9).reshape(rows, 9) % 5,
        }
        for _ in range(number)
    ]


def tensors(outputs):
    """The outputs of all features as plain tensors; masks and offsets among them."""
    found = []
    for name in all_layouts():
        entry = outputs[name]
        if isinstance(entry, Padded):
            found += [entry.values, entry.mask]
        elif isinstance(entry, Ragged):
            found += [entry.values, entry.offsets]
        elif isinstance(entry, IndexedRows):
            found += [entry.to_sequence().values, entry.vectors, entry.index]
            found += [] if entry.weights is None else [entry.weights]
        else:
            found.append(entry)
    return found


def loss_of(outputs):
    """Every element matters, and differently."""
    total = torch.zeros(())
    for place, tensor in enumerate(t for t in tensors(outputs) if t.is_floating_point()):
        weights = torch.linspace(0.5, 1.5, tensor.numel()).reshape(tensor.shape) + place
        total = total + (tensor * weights).sin().sum()
    return total


def rows_of(engine):
    """All rows of all tables, as bytes and lists."""
    found = {}
    for table in engine.tables():
        rows = engine.store.table(table.name).snapshot()
        order = rows.keys.argsort()
        found[table.name] = [column[order].tolist() for column in rows]
    return found


def train(engine, given, optimizer, accumulate=1, ahead=0):
    """Outputs of each batch; `ahead` batches are prepared before their turn."""
    seen = []
    given = list(given)
    for number, batch in enumerate(given):
        for later in given[number if number == 0 else number + ahead : number + ahead + 1] if ahead else []:
            engine.prepare(later, training=True)
        outputs = engine(batch)
        seen.append([t.detach().clone() for t in tensors(outputs)])
        loss_of(outputs).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
    return seen


def in_memory(given, accumulate=1):
    """An engine in memory that is trained on these batches, and their outputs."""
    kv.connect("memory")
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    seen = train(engine, given, kv.optim.Adagrad(engine, lr=0.1), accumulate)
    return engine, seen
