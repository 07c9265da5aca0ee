"""Embedding workers in an elastic run: they look up and stage in the name of a member."""

import contextlib
import itertools
import time

import pytest
from cluster_helpers import serving
from elastic_trainers import ElasticTrainer, connection_of, in_memory
from free_ports import free_port
from sharded_programs import global_batch, loss_of, part_of

from karvan import distributed
from karvan.cluster.embedding_worker.client import WorkerClient
from karvan.cluster.embedding_worker.service import EmbeddingWorker
from karvan.cluster.loader_access import LoaderAccess
from karvan.cluster.task_stream import LoadedData
from karvan.ragged import REFERENCE, Batch, IdsReference
from karvan.wire import RefusedError, Security, Server

STEPS, BATCHES = 3, 3
_names = itertools.count()


class WorkerTrainer(ElasticTrainer):
    """A member whose batches workers look up; a worker that has lost ids gets them again."""

    def __init__(self, connection, clients):
        super().__init__(connection)
        self.clients = clients
        self.batches = {}
        self.resent = 0
        connection.workers.resend = self.resend

    def resend(self, reference):
        self.resent += 1
        self.clients[reference.worker].put(reference.name, self.batches[reference.name])

    def backward(self, step, number):
        self.engine.step = step - 1
        for handle in self.engine.tables():
            self.sparse.state[handle.anchor]["step"] = step - 1
        batch = Batch(part_of(global_batch(100 * step + number, 6), 0, 1))
        ids = {name: batch[name] for name in self.used}
        name, worker = f"batch {next(_names)}", (step + number) % len(self.clients)
        self.batches[name] = ids
        self.clients[worker].put(name, ids)
        outputs = self.engine({REFERENCE: IdsReference(worker, name, batch.samples)})
        loss_of(outputs, self.used, 1.0).backward()


class ElasticCluster:
    """Two servers and some workers in this process, and members of one run."""

    def __init__(self, monkeypatch, stack, addresses, workers=2, **options):
        monkeypatch.setenv("KARVAN_PARAMETER_SERVER_ADDRESSES", ",".join(addresses))
        self.addresses, self.options, self.stack = addresses, options, stack
        self.run = f"elastic workers {next(_names)}"
        self.services, self.servers = {}, {}
        for index in range(workers):
            self.start(index)
        self.clients = [
            stack.enter_context(contextlib.closing(WorkerClient(index, server.address)))
            for index, server in self.servers.items()
        ]

    def start(self, index, port=None):
        self.services[index] = EmbeddingWorker(index, **self.options)
        self.servers[index] = Server(self.services[index], port=port or free_port())

    def replace(self, index):
        """Another one takes its place, at the same port, and knows nothing."""
        port = int(self.servers[index].address.rpartition(":")[2])
        self.servers[index].close(0.1)
        self.services[index].close()
        self.start(index, port)

    def join(self, member, mode="sync", run=None):
        connection = connection_of(
            self.addresses, run or self.run, member, mode, workers=[s.address for s in self.servers.values()]
        )
        return self.stack.enter_context(contextlib.closing(WorkerTrainer(connection, self.clients)))

    def close(self):
        for index, server in self.servers.items():
            server.close(0.1)
            self.services[index].close()


@pytest.fixture
def start(monkeypatch):
    """start(**options) makes a cluster whose workers have these options."""
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(serving(2))

        def begin(**options):
            return stack.enter_context(
                contextlib.closing(ElasticCluster(monkeypatch, stack, addresses, **options))
            )

        yield begin


def commit(trainers, step, staged):
    for each in staged:
        each.wait()
    for trainer in trainers:
        trainer.commits.commit(step, [each.part for each in staged], 1.0, {"step": step})


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("replaces", [False, True])
def test_steps_through_workers_have_the_bits_of_one_process(start, members, replaces):
    cluster = start()
    trainers = [cluster.join(member) for member in range(members)]
    for step in range(1, STEPS + 1):
        staged = []
        for number in range(BATCHES):
            staged.append(trainers[(step + number) % members].stage(step, number))
            if replaces:
                cluster.replace((step + number) % 2)
        commit(trainers, step, staged)
    assert trainers[0].rows() == in_memory(STEPS, BATCHES)
    if not replaces:
        assert sum(each.resent for each in trainers) == 0


def test_what_is_staged_by_a_worker_can_be_dropped_and_staged_again(start):
    cluster = start()
    trainer = cluster.join(1)
    staged = trainer.stage(1, 0)
    for _ in range(3):
        staged.wait()
        assert [one.staged for one in trainer.commits.progress()] == [[(1, *staged.part)]] * 2
        trainer.commits.drop(1)
        assert [one.staged for one in trainer.commits.progress()] == [[], []]
        cluster.replace(1)
        staged = staged.restage()
    commit([trainer], 1, [staged])
    assert trainer.rows() == in_memory(1, 1)


def test_a_fenced_member_is_refused_through_a_worker_too(start):
    cluster = start()
    survivor, zombie = cluster.join(0), cluster.join(1)
    its = zombie.stage(1, 1)
    its.wait()
    survivor.commits.fence(1)
    with pytest.raises(RefusedError, match="got member 1, fenced off by the others"):
        zombie.stage(2, 0).wait()
    mine = survivor.stage(1, 0)
    commit([survivor], 1, [mine])
    assert survivor.rows() == in_memory(1, 1)


def test_workers_forget_members_that_are_gone_and_the_ids_they_have_claimed(start):
    cluster = start(workers=1)
    survivor, dead = cluster.join(0), cluster.join(1)
    survivor.stage(1, 0).wait()
    dead.stage(1, 1).wait()
    worker = cluster.services[0]
    assert (sorted(worker._sessions), len(worker._ids)) == ([0, 1], 2)
    survivor.connection.abandon([1])
    wait_for(lambda: (sorted(worker._sessions), len(worker._ids)) == ([0], 1))


def test_a_silent_member_is_forgotten_and_can_come_back(start):
    cluster = start(workers=1, expire=1.0)
    silent, other = cluster.join(0), cluster.join(1)
    worker = cluster.services[0]
    silent.stage(1, 0).wait()
    silent.commits.begin_step(1)
    silent.backward(1, 1)  # its gradients wait here, while its session is dropped
    wait_for(lambda: worker._sessions[0].silence > 1.0)
    other.stage(1, 2).wait()
    assert sorted(worker._sessions) == [1]
    silent.sparse.step()
    silent.commits.staged(1)[-1].wait()
    assert silent.resent >= 1
    parts = [*silent.commits.staged(1), *other.commits.staged(1)]
    commit([silent, other], 1, parts)
    assert silent.rows() == in_memory(1, 3)


def test_leased_data_of_a_job_with_workers_names_the_ids(start, monkeypatch):
    cluster = start(workers=1)
    monkeypatch.setattr(distributed.connection, "_current", cluster.join(0).connection)
    access = LoaderAccess(1, str, Security(), 1.0)
    with pytest.raises(ValueError, match="This job has embedding workers, but"):
        LoadedData(access, 1)
    for ids in (["user"], []):
        LoadedData(access, 1, ids)


def test_a_run_that_is_over_does_not_come_back(start):
    cluster = start(workers=1)
    old, other = cluster.join(0), cluster.join(1)
    old.stage(1, 0).wait()
    new = cluster.join(2, run="the next run")
    new.stage(1, 0).wait()
    with pytest.raises(RefusedError, match=r"newest run|trainers have restarted"):
        other.stage(1, 0).wait()
    commit([new], 1, new.commits.staged(1))
    assert new.rows() == in_memory(1, 1)
