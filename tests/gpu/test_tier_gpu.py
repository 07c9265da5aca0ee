"""The host tier on a GPU: page-locked memory that kernels work on, and exchanges on a stream of their own."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import numpy as np
from capture_walk import CaptureWalk
from gpu_waits import no_synchronization
from rows_conformance import assert_same_rows
from tier_conformance import (
    TierConformance,
    best_hit_rate,
    check_locations,
    prepared_phases,
    zipf_batches,
)

import karvan as kv
from karvan import distributed
from karvan.store.cuda.store import CudaStore


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def size():
    return SimpleNamespace(examples=4, walk=20, steps=60, warm=40, batch=5000, rows=4000, phase=20)


class TestTier(TierConformance):
    pass


def trained(store, batches, *, stream=None):
    """An engine after a training whose shapes are the same in every step, so that graphs are replayed.

    stream: on which each batch is copied to the device and prepared, while the one before it is computed.
    """
    engine = kv.EmbeddingEngine({"f": kv.Table(64), "g": kv.Table(64, combiner="mean")}, seed=1, store=store)
    sparse = kv.optim.Adam(engine, lr=0.01)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()

    def placed(ids):
        if stream is None:
            return {"f": ids.cuda(), "g": ids.cuda().view(-1, 1)}
        with torch.cuda.stream(stream):
            batch = {"f": ids.pin_memory().cuda(non_blocking=True)}
            batch["g"] = (batch["f"] + 0).view(-1, 1)
            engine.prepare(batch, training=True)
        return batch

    following = placed(batches[0]["f"])
    for step in range(len(batches)):
        batch = following
        if step + 1 < len(batches):
            following = placed(batches[step + 1]["f"])
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        out = engine(batch)
        net(torch.cat([out["f"], out["g"]], 1)).square().mean().backward()
        sparse.step()
        net.zero_grad()
    torch.cuda.synchronize()
    return engine


@pytest.mark.parametrize("ahead", [False, True])
def test_graphs_and_streams_give_the_bits_of_a_store_without_a_tier(ahead):
    """A quarter of the rows is on the GPU; steps of equal shapes replay graphs between exchanges."""
    rows = 20_000
    batches = zipf_batches(30, 8192, rows, "cpu")
    location = 64 * 4 * 3 + 32 + 8
    tiered = CudaStore("cuda", location * rows // 4)
    one = trained(CudaStore("cuda"), batches)
    other = trained(tiered, batches, stream=torch.cuda.Stream() if ahead else None)
    for name in ("f", "g"):
        assert_same_rows(one.table(name).snapshot(), other.table(name).snapshot())
    check_locations(tiered)
    stats = other.table("f").stats()
    assert stats["tier_exchanges"] > 0
    distinct = sum(len(batch["f"].unique()) for batch in batches)
    assert stats["tier_hits"] + stats["tier_misses"] == distinct


def test_training_through_connect():
    """The hit rate of a table of four times the memory that its rows may take."""
    rows = 8_000
    batches = zipf_batches(80, 8192, 4 * rows, "cuda")
    kv.connect("cuda", device_memory=(16 * 4 * 2 + 32 + 8) * rows)
    try:
        engine = kv.EmbeddingEngine({"f": kv.Table(16)})
        sparse = kv.optim.Adagrad(engine, lr=0.1)
        for step, batch in enumerate(batches):
            if step == 50:
                before = engine.table("f").stats()
            engine(batch)["f"].square().sum().backward()
            sparse.step()
        after = engine.table("f").stats()
    finally:
        distributed.disconnect()
    hits, misses = (after[name] - before[name] for name in ("tier_hits", "tier_misses"))
    assert after["host_bytes"] > 0
    assert after["device_bytes"] + after["host_bytes"] == after["bytes"]
    assert hits / (hits + misses) > 0.85 * best_hit_rate(batches, 50, rows - 1)
    keys = np.unique(np.concatenate([batch["f"].cpu().numpy() for batch in batches]))
    assert after["rows"] == len(keys)


def test_addresses_are_replaced_while_updates_are_in_flight():
    """The table of addresses grows between lookup and update, and graphs of the old one are not replayed."""
    stores = [CudaStore("cuda"), CudaStore("cuda", 100_000)]
    for store in stores:
        engine = kv.EmbeddingEngine({"f": kv.Table(8, init=kv.init.Constant(0.5))}, store=store)
        sparse = kv.optim.SGD(engine, lr=0.1)
        for step in range(8):
            first = engine({"f": torch.arange(1000, device="cuda") + step})["f"]
            engine({"f": torch.arange(40_000 * (step + 1), device="cuda") * 7})
            first.sum().backward()
            sparse.step()
    assert_same_rows(*(store.table("f").snapshot() for store in stores))
    check_locations(stores[1])


@pytest.mark.parametrize("seed", range(8))
def test_captures_are_read_while_rows_exchange_locations(seed):
    store = CudaStore("cuda", 600)
    CaptureWalk(store, random.Random(seed)).run(60)
    check_locations(store)


def recorded(store):
    """How many parts of exchanges have graphs."""
    exchanges = store._exchange._launches.values()
    return sum(graph is not None for each in exchanges for graph in each._graphs.values())


def test_exchanges_are_replayed_in_every_phase_of_a_training(size):
    """Of each of two layouts: the part for the next batch, and that for the lookup."""
    tiered = CudaStore("cuda", 2 * (64 + 8) * size.rows)
    both = [prepared_phases(store, "cuda", size, size.phase) for store in (CudaStore("cuda"), tiered)]
    most, most_of_phases = 0, []
    for (plain, ended), (one, _) in zip(*both, strict=True):
        most = max(most, recorded(tiered))
        if ended:
            most_of_phases.append(most)
            most = 0
            for name in "fg":
                assert_same_rows(plain.engine.table(name).snapshot(), one.engine.table(name).snapshot())
    assert most_of_phases[0] >= 2
    assert min(most_of_phases[1:]) >= 4, most_of_phases
    check_locations(tiered)


def test_no_call_of_a_step_with_a_prepared_batch_waits():
    rows = 4000
    store = CudaStore("cuda", (64 + 8) * rows)
    engine = kv.EmbeddingEngine({"f": kv.Table(4)}, store=store)
    optimizer = kv.optim.Adagrad(engine, lr=0.1)
    engine({"f": torch.arange(4 * rows, device="cuda")})["f"].sum().backward()
    optimizer.step()
    batches = zipf_batches(12, 5000, 4 * rows, "cuda")
    numbers = itertools.count()

    def train(steps):
        for number in itertools.islice(numbers, steps):
            assert engine.prepare(batches[(number + 1) % len(batches)], training=True)
            engine(batches[number % len(batches)])["f"].square().sum().backward()
            optimizer.step()

    train(48)
    ahead = []
    for _ in range(8):  # the first ones still record graphs, which waits
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # about half a second
        slept = torch.cuda.current_stream().record_event()
        train(2)
        ahead.append(not slept.query())
    assert all(ahead[-3:]), ahead
    assert recorded(store) >= 2
    with no_synchronization():
        train(12)
    assert engine.table("f").stats()["tier_exchanges"] > 0
    check_locations(store)
