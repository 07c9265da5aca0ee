"""Loaders that die: those that replace them read the ids again that trainers are not done with."""

import threading

import numpy as np
import pytest
import torch
from free_ports import free_port

import karvan as kv
from karvan.cluster.loader.epoch_service import EpochService, serve
from karvan.cluster.loader.service import BatchName, LoaderStatistics
from karvan.ragged import REFERENCE
from karvan.wire import RefusedError, Server

RECORDS, SIZE = 36, 3


class Worker:
    """Takes ids, in this process."""

    def __init__(self):
        self.ids = {}

    def put(self, reference, ids):
        self.ids[reference] = ids["user"].tolist()


class Source:
    """Batches with positions, which notes how many were read."""

    def __init__(self):
        columns = {"user": np.arange(RECORDS), "price": np.arange(RECORDS) / 2}
        self.data = kv.data.read(columns, SIZE, shuffle=7, seed=3, split_records=5)
        self.read = 0

    def __iter__(self):
        for batch in self.data:
            self.read += 1
            yield batch

    def state_dict(self):
        return self.data.state_dict()

    def load_state_dict(self, state):
        self.data.load_state_dict(state)


def of_epoch(epoch, size=SIZE, records=RECORDS):
    users = np.random.default_rng(epoch).permutation(records)
    return [
        {"user": torch.from_numpy(users[at : at + size]), "price": torch.ones(len(users[at : at + size]))}
        for at in range(0, records, size)
    ]


SOURCES = {"positions": Source, "function": lambda: of_epoch, "list": lambda: of_epoch(0)}


class ReplacedLoader:
    """A loader at one address, and its worker; both can be replaced."""

    def __init__(self, make, trainers=1):
        self._make = make
        self._server = None
        self.start()
        self.trainers = [
            kv.data.from_loaders(
                loaders=[self._server.address], ids=["user"], rank=rank, world_size=trainers, prefetch=2
            )
            for rank in range(trainers)
        ]

    def start(self, make=None, statistics=None):
        self.worker, self.source = Worker(), (make or self._make)()
        self._service = EpochService(workers=[self.worker])
        port = int(self._server.address.rpartition(":")[2]) if self._server else free_port()
        self._server = Server(self._service, port=port)
        threading.Thread(
            target=self._serve, args=(self._service, self.source, statistics), daemon=True
        ).start()

    def _serve(self, service, source, statistics):
        try:
            serve(service, source, statistics)
        except Exception as error:
            service.fail(error)

    def replace(self, *changed):
        """Both end without a word; others take their places, and know nothing."""
        self.stop()
        self.start(*changed)

    def stop(self):
        self._service.close()  # first, so that the server has no calls to wait for
        self._server.close()

    def resend(self, batch, trainer=0):
        """The ids that the worker gets when the trainer asks for them again."""
        self.trainers[trainer]._resend(batch[REFERENCE])
        return self.worker.ids[batch[REFERENCE].name]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for trainer in self.trainers:
            trainer.close()
        self.stop()


def take(trainer, count=None):
    """The next batches."""
    taken = []
    for batch in trainer:
        taken.append(batch)
        if len(taken) == count:
            break
    return taken


def users_of(make, epochs=1):
    """The ids of all batches of each epoch, by number, as a loader sends them that does not die."""
    with ReplacedLoader(make) as loader:
        for _ in range(epochs):
            take(loader.trainers[0])
        sent = {BatchName.named(name): ids for name, ids in loader.worker.ids.items()}
    return [
        {name.number: ids for name, ids in sent.items() if name.epoch == epoch} for epoch in range(epochs)
    ]


@pytest.mark.parametrize("kind", SOURCES)
def test_ids_of_unfinished_batches_can_be_sent_again_by_another_loader(kind):
    (expected,) = users_of(SOURCES[kind])
    with ReplacedLoader(SOURCES[kind]) as loader:
        (trainer,) = loader.trainers
        batches = take(trainer, 6)
        finished = kv.ragged.IdsReference(0, batches[1][REFERENCE].name, SIZE)
        del batches[:2]
        loader.replace()
        for batch in reversed(batches):
            assert loader.resend(batch) == expected[batch.number]
        with pytest.raises(RefusedError, match="not done with"):
            trainer._resend(finished)
        rest = take(trainer)
        assert [batch.number for batch in rest] == list(range(6, 12))
        assert {batch.number: loader.resend(batch) for batch in rest} == {
            number: expected[number] for number in range(6, 12)
        }
        if kind == "positions":
            assert loader.source.read == 10  # all but the two that the trainer was done with


@pytest.mark.parametrize("kind", SOURCES)
def test_ids_of_the_last_batches_can_be_sent_again_though_nobody_asks_for_more(kind):
    expected = users_of(SOURCES[kind], epochs=2)
    with ReplacedLoader(SOURCES[kind]) as loader:
        (trainer,) = loader.trainers
        for epoch in range(2):
            batches = take(trainer)[-2:]
            for _ in range(2):  # the second one has what its predecessor had read again
                loader.replace()
                assert [loader.resend(batch) for batch in batches] == [expected[epoch][n] for n in (10, 11)]


@pytest.mark.parametrize("kind", SOURCES)
def test_ids_of_two_epochs_are_read_again(kind):
    expected = users_of(SOURCES[kind], epochs=2)
    with ReplacedLoader(SOURCES[kind]) as loader:
        (trainer,) = loader.trainers
        batches = take(trainer)[-2:] + take(trainer, 2)
        loader.replace()
        rest = take(trainer)
        assert [(batch.epoch, batch.number) for batch in rest] == [(1, number) for number in range(2, 12)]
        for batch in batches + rest:
            assert loader.resend(batch) == expected[batch.epoch][batch.number]


def test_each_trainer_gets_its_own_ids_again():
    (expected,) = users_of(Source)
    with ReplacedLoader(Source, trainers=2) as loader:
        taken = [[], []]

        def advance(counts):
            threads = [
                threading.Thread(target=lambda r=rank, c=count: taken[r].extend(take(loader.trainers[r], c)))
                for rank, count in enumerate(counts)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)

        advance((4, 1))
        loader.replace()
        for rank in range(2):
            for batch in taken[rank]:
                assert loader.resend(batch, rank) == expected[batch.number]
        advance((None, None))
        assert [[batch.number for batch in each] for each in taken] == [
            list(range(0, 12, 2)),
            list(range(1, 12, 2)),
        ]


def test_a_loader_that_reads_fewer_batches_than_before_says_so():
    with ReplacedLoader(lambda: of_epoch(0)) as loader:
        batches = take(loader.trainers[0])
        loader.replace(lambda: of_epoch(0, records=RECORDS - SIZE))
        with pytest.raises(RuntimeError, match=r"(^|: )Epoch 0 expected 12 batches, as before, got 11"):
            loader.resend(batches[-1])


def test_other_statistics_of_another_loader_are_an_error():
    with ReplacedLoader(Source) as loader:
        (trainer,) = loader.trainers
        trainer.transform_states()
        batches = take(trainer, 2)
        engine = kv.FeatureEngine([kv.Feature("price").normalise()])
        engine.fit([{"price": torch.arange(4.0)}])
        loader.replace(Source, LoaderStatistics.of([engine]))
        with pytest.raises(ValueError, match="other statistics than when training started"):
            loader.resend(batches[0])
