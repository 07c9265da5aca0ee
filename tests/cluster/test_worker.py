"""Embedding workers: ids with them, vectors and gradients as if they were here."""

import itertools

import pytest
import torch
from worker_helpers import Cluster, Loader, all_layouts, batches, loss_of, rows_of, tensors

import karvan as kv

_names = itertools.count()


@pytest.fixture(scope="module")
def clusters():
    made = {servers: Cluster(servers, 2) for servers in (1, 2)}
    for cluster in made.values():
        cluster.wait()
    yield made
    for cluster in made.values():
        cluster.close()


@pytest.fixture
def job(clusters, monkeypatch):
    """job(servers, workers) makes this process a trainer, and gives a loader."""
    opened = []

    def begin(servers=1, workers=1, **options):
        connection = clusters[servers].connect(monkeypatch, workers, **options)
        loader = Loader(clusters[servers], workers, f"job {next(_names)}").serve(connection)
        opened.append(loader)
        return loader

    yield begin
    for loader in opened:
        loader.close()
    kv.connect("memory")


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
    kv.connect("memory")
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    seen = train(engine, given, kv.optim.Adagrad(engine, lr=0.1), accumulate)
    return engine, seen


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_results_are_those_of_memory_bit_for_bit(job, servers, workers):
    given = batches(6)
    reference, expected = in_memory(given)
    expected_eval = tensors(reference.eval()(batches(1, seed=9)[0]))
    rows = rows_of(reference)
    loader = job(servers, workers)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    seen = train(engine, [loader.send(batch) for batch in given], kv.optim.Adagrad(engine, lr=0.1))
    for a, b in zip(itertools.chain(*seen), itertools.chain(*expected), strict=True):
        assert torch.equal(a, b)
    engine.eval()
    for a, b in zip(tensors(engine(loader.send(batches(1, seed=9)[0]))), expected_eval, strict=True):
        assert torch.equal(a, b)
    assert rows_of(engine) == rows
    assert engine.store.window.most == 1
    assert loader.resent == 0
