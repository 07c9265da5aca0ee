"""Embedding workers that are killed: others replace them, and no batch is lost or counted twice."""

import random
import threading
from collections import deque
from contextlib import contextmanager, nullcontext

import pytest
import torch
from support_paths import support_path
from worker_helpers import all_layouts, batches, in_memory, loss_of, rows_of, tensors

import karvan as kv


@pytest.mark.parametrize(
    "moment", ["pushed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sent", "claimed"))]
)
def test_a_killed_worker_is_replaced_without_losing_a_batch(job, clusters, moment):
    given = batches(4)
    reference, expected = in_memory(given)
    rows = rows_of(reference)
    loader = job(2, 1)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    optimizer = kv.optim.Adagrad(engine, lr=0.1)
    for number, batch in enumerate(given):
        sent = loader.send(batch)
        if number == 1 and moment == "sent":
            clusters[2].replace(0)
        outputs = engine(sent)
        for a, b in zip(tensors(outputs), expected[number], strict=True):
            assert torch.equal(a, b)
        if number == 1 and moment == "claimed":
            clusters[2].replace(0)
        loss_of(outputs).backward()
        optimizer.step()
        if number == 1 and moment == "pushed":
            clusters[2].replace(0)
    assert rows_of(engine) == rows
    assert loader.resent <= 2  # of the batch before as well, if its gradients were on their way
    assert loader.resent >= 1 or moment == "pushed"


@contextmanager
def killing(cluster, seed, pause=(0.2, 2)):
    """Kills one worker after the other."""
    ended = threading.Event()

    def kill():
        order = random.Random(seed)
        while not ended.wait(order.uniform(*pause)):
            worker = order.randrange(2)
            cluster.replace(worker)
            cluster.directory.find("embedding-worker", worker)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        ended.set()
        killer.join()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 4])
def test_workers_killed_at_any_moment(job, clusters, staleness):
    given = batches(120)
    reference, _ = in_memory(given)
    rows = rows_of(reference)
    loader = job(2, 2, staleness=staleness)
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    with killing(clusters[2], staleness):
        optimizer = kv.optim.Adagrad(engine, lr=0.1)
        engine.hold_prepared(staleness + 2)
        waiting = deque()
        for batch in [*given, *[None] * (staleness - 1)]:
            if batch is not None:
                waiting.append(loader.send(batch))
                engine.prepare(waiting[-1], training=True)
            if len(waiting) == staleness or batch is None:
                loss_of(engine(waiting.popleft())).backward()
                optimizer.step()
        engine.store.window.drain()
    assert engine.store.window.most <= staleness
    assert loader.resent > 0
    found = rows_of(engine)
    if staleness == 1:
        assert found == rows
    for name, (keys, vectors, _, counts, *_) in found.items():
        assert keys == rows[name][0]
        assert counts == rows[name][3]  # each batch was looked up once
        assert torch.isfinite(torch.tensor(vectors)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True])
def test_trainers_that_wait_for_each_other_get_the_same_with_workers(clusters, tmp_path, kills):
    with killing(clusters[2], 7, (2.5, 5)) if kills else nullcontext():
        clusters[2].run_trainers(support_path("cluster/worker_trainers.py"), tmp_path, 2, 150 if kills else 5)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for own, away in ranks:
        for a, b in zip(own["seen"], away["seen"], strict=True):
            assert torch.equal(a, b)
        assert own["rows"] == away["rows"]
        assert own["skipped"] == away["skipped"]
        assert own["most"] == away["most"] == 1
    skipped = {table: sum(own["skipped"][table] for own, _ in ranks) for table in ranks[0][0]["skipped"]}
    assert {table for table, count in skipped.items() if count} == {"root"}
