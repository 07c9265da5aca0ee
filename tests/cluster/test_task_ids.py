"""The ids of leased batches on their way to embedding workers: sent, sent again by any loader, forgotten."""

import itertools
import time
from contextlib import contextmanager

import pytest
import torch
from free_ports import free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from task_loaders import Numbers, shared_data, task_loaders

from karvan.cluster.embedding_worker.client import WorkerClient
from karvan.cluster.embedding_worker.service import EmbeddingWorker
from karvan.cluster.loader.service import SendTo, TaskIds
from karvan.cluster.loader_access import LoaderConnection
from karvan.cluster.task_stream import TaskRequests
from karvan.data.task_records import TaskToRead, records_done
from karvan.errors import is_temporary
from karvan.ragged import REFERENCE, Batch
from karvan.wire import RefusedError, Server
from karvan.work.task import Task, TaskKind


class Workers:
    """Embedding workers at ports of this process, which can be lost."""

    def __init__(self, count, deadline=30.0):
        self.services = [EmbeddingWorker(index) for index in range(count)]
        self.servers = [Server(each, port=free_port()) for each in self.services]
        self.clients = [
            WorkerClient(index, server.address, deadline=deadline)
            for index, server in enumerate(self.servers)
        ]

    def lose(self, index):
        """What it holds is lost; another one, at another port, takes its place."""
        self.servers[index].close(0.1)
        self.services[index].close()

    def ids(self, reference):
        return self.services[reference.worker]._ids.claim(reference.name)

    def close(self):
        for each in (*self.clients, *self.servers):
            each.close()


@contextmanager
def workers_of(count, **options):
    made = Workers(count, **options)
    try:
        yield made
    finally:
        made.close()


def both(batch):
    """The ids, and beside them what the trainer gets."""
    return Batch({**batch, "label": batch["id"].float()})


@settings(max_examples=5)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    batch_size=st.integers(1, 9),
    records_per_task=st.integers(1, 12),
    seed=st.none() | st.integers(0, 3),
)
def test_ids_that_any_loader_sends_again_are_those_of_the_batch(
    tmp_path_factory, counts, batch_size, records_per_task, seed
):
    source = Numbers(counts)
    data = shared_data(source, batch_size, seed, both, records_per_task)
    with workers_of(2) as workers:
        folder = tmp_path_factory.mktemp("loaders")
        with task_loaders(folder, data, data, workers=workers.clients) as loaders:
            leased = loaders.data(ids=["id"])
            client = loaders.client(leased.spec())
            resend = TaskRequests(loaders.access(), ["id"], leased._description.digest).resend
            batches, seen = leased.lease(client, 0), []
            for batch in batches:
                reference = batch[REFERENCE]
                assert set(batch) == {"label", REFERENCE}
                assert torch.equal(workers.ids(reference)["id"].float(), batch["label"])
                workers.services[reference.worker]._ids.forget([reference.name])
                resend(reference)
                assert torch.equal(workers.ids(reference)["id"].float(), batch["label"])
                seen += batch["label"].long().tolist()
                client.acknowledge(records_done(batches.hand_over()))
            assert sorted(seen) == source.all()


def test_planned_batches_can_be_sent_again_too(tmp_path):
    data = shared_data(Numbers([50, 9]), 4, 7, both)
    with workers_of(1) as workers, task_loaders(tmp_path, data, workers=workers.clients) as loaders:
        leased = loaders.data(ids=["id"])
        resend = TaskRequests(loaders.access(), ["id"], leased._description.digest).resend
        for batch in leased.planned(leased.plan(), epoch=1, first=2, rank=0, ranks=2, of_step=3):
            workers.services[0]._ids.forget([batch[REFERENCE].name])
            resend(batch[REFERENCE])
            assert torch.equal(workers.ids(batch[REFERENCE])["id"].float(), batch["label"])


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_what_was_read_in_advance_for_nobody_is_forgotten(tmp_path):
    data = shared_data(Numbers([400]), 4, transform=both)
    with workers_of(2) as workers, task_loaders(tmp_path, data, workers=workers.clients) as loaders:

        def held():
            return sum(len(each._ids) for each in workers.services)

        tasks = [TaskToRead(Task(TaskKind.TRAIN, 0, 0, "0", 0, 400), True)]
        connection = LoaderConnection(0, loaders.access())
        while (
            "wait" in connection.call("read_batch", TaskRequests(loaders.access(), ["id"]).head(tasks)).head
        ):
            pass
        wait_for(lambda: held() == 3)  # the batch of the caller, and two that wait for it
        connection.leave()
        wait_for(lambda: held() == 1)


def test_a_worker_that_does_not_answer_is_passed_over():
    with workers_of(2, deadline=0.5) as workers:
        sent = TaskIds(workers.clients)
        workers.lose(0)
        references = [sent.send(Batch({"id": torch.arange(3)}), ["id"], None, bool)[1] for _ in range(3)]
        assert [each.worker for each in references] == [1, 1, 1]
        assert len({each.name for each in references}) == 3
        with pytest.raises(RefusedError, match="expected one of 2 embedding workers, got 2"):
            sent.send(Batch({"id": torch.arange(3)}), ["id"], SendTo(2, "name"), bool)
        sent.forget(references)
        wait_for(lambda: len(workers.services[1]._ids) == 0)


def test_without_workers_names_or_samples_a_batch_stays_whole():
    with workers_of(1) as workers:
        whole = Batch({"id": torch.arange(3)})
        empty = Batch({"id": torch.empty(0, dtype=torch.int64)})
        assert TaskIds().send(whole, ["id"], None, bool) == (whole, None)
        assert TaskIds(workers.clients).send(whole, [], None, bool) == (whole, None)
        assert TaskIds(workers.clients).send(empty, ["id"], None, bool) == (empty, None)
        with pytest.raises(ValueError, match="expects the id feature 'user'"):
            TaskIds(workers.clients).send(whole, ["user"], None, bool)


def test_a_transform_that_gives_other_ids_is_an_error_and_not_a_wrong_row(tmp_path):
    reads = itertools.count()

    def random(batch):
        return Batch({"id": batch["id"] + next(reads), "label": batch["id"].float()})

    data = shared_data(Numbers([40]), 4, transform=random)
    with workers_of(1) as workers, task_loaders(tmp_path, data, workers=workers.clients) as loaders:
        leased = loaders.data(ids=["id"])
        resend = TaskRequests(loaders.access(), ["id"], leased._description.digest).resend
        batch = next(iter(leased.lease(loaders.client(leased.spec()), 0)))
        with pytest.raises(RuntimeError, match="expected to read the same ids again, got others") as caught:
            resend(batch[REFERENCE])
        assert is_temporary(caught.value)  # the trainer ends, and another one reads the batch anew
