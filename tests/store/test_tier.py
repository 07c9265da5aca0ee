"""The host tier in Triton's interpreter; tests/gpu runs the same on a GPU."""

import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from capture_walk import CaptureWalk
from device_conformance import DeviceConformance
from rows_conformance import assert_same_rows
from store_kinds import StoreKind, make_tiered
from tier_conformance import TierConformance, Trained, check_locations, zipf_batches

import karvan as kv
from karvan.distributed.connection import Connection, ConnectionSettings
from karvan.store import LookupContext
from karvan.store.cuda import arena
from karvan.store.cuda.arena import DeviceBudget
from karvan.store.cuda.sharded import ShardedCudaStore
from karvan.store.cuda.store import CudaStore


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def size():
    return SimpleNamespace(examples=4, walk=6, steps=20, warm=12, batch=60, rows=48, phase=1)


class TestTier(TierConformance):
    pass


def test_the_budget_is_divided_over_layouts_that_have_tables():
    budget = DeviceBudget(1000)
    assert [budget.share(name, "abc") for name in "abc"] == [333] * 3
    assert budget.share("late", ["a", "b", "c", "late"]) == 1
    assert budget.share("instead", ["a", "instead"]) == 667  # b and c have no tables any more
    assert budget.share("a", ["a"]) == 333


def test_layouts_share_the_memory_that_rows_may_take():
    engine = kv.EmbeddingEngine({"a": kv.Table(4), "b": kv.Table(8)}, store=CudaStore("cpu", 4000))
    kv.optim.SGD(engine, lr=1.0)
    engine({"a": torch.arange(90), "b": torch.arange(90)})
    stats = [engine.table(name).stats() for name in "ab"]
    arenas = [table.arena for table in engine.store.memory.tables.values()]
    assert [arena.row_bytes for arena in arenas] == [48, 64]
    assert [arena.device_rows for arena in arenas] == [2000 // (48 + 8), 2000 // (64 + 8)]
    for rows, each in zip(arenas, stats, strict=True):
        assert each["host_bytes"] == (90 - (rows.device_rows - 1)) * rows.row_bytes
        assert each["host_bytes"] + each["device_bytes"] == each["bytes"]


def test_a_store_without_a_tier_has_all_rows_on_the_device():
    engine = kv.EmbeddingEngine({"a": kv.Table(4)}, store=CudaStore("cpu"))
    engine({"a": torch.arange(90)})
    stats = engine.table("a").stats()
    assert stats["host_bytes"] == stats["tier_hits"] == stats["tier_misses"] == 0
    assert stats["device_bytes"] == stats["bytes"]


def test_a_batch_that_is_dropped_before_its_lookup_is_forgotten():
    engine = kv.EmbeddingEngine({"a": kv.Table(4)}, store=CudaStore("cpu", 2000))
    for first in range(3):
        engine.prepare({"a": torch.arange(first, first + 90)}, training=True)
    engine({"a": torch.arange(90)})
    engine.forget_prepared()
    engine({"a": torch.arange(90)})
    assert not engine.store._exchange._expected


def test_no_memory_on_the_machine_is_an_error_that_names_the_tables(monkeypatch):
    monkeypatch.setattr(arena, "available_bytes", lambda: 1 << 20)
    engine = kv.EmbeddingEngine({"a": kv.Table(4, name="shops")}, store=CudaStore("cpu", 2000))
    engine({"a": torch.arange(30)})
    with pytest.raises(torch.OutOfMemoryError, match=r"on the machine .*Tables: shops .*30 rows.*evict="):
        engine({"a": torch.arange(400)})


@pytest.mark.parametrize(
    ("given", "size"),
    [("20GB", 20_000_000_000), ("512 MiB", 512 << 20), ("1.5KB", 1500), ("64", 64), (4096, 4096)],
)
def test_sizes_of_memory(given, size):
    from karvan.distributed.connection import memory_size

    assert memory_size(given) == size


@pytest.mark.parametrize("given", ["lots", "", "-1GB", "20 gigs", "0GB", -5, 0, True, 1.5])
def test_a_wrong_size_is_refused(given):
    with pytest.raises(ValueError, match="device_memory expects a size above 0, such as"):
        kv.connect("cuda", device_memory=given)


def test_a_size_for_tables_that_are_not_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r'device_memory is for connect\("cuda"\) and .*"memory"'):
        kv.connect("memory", device_memory="1GB")
    with pytest.raises(ValueError, match=r'device_memory is for connect\("cuda"\) and .*"sharded"'):
        kv.connect("sharded", device_memory="1GB")
    with pytest.raises(ValueError, match=r'connect\("cuda"\) expects a GPU'):
        kv.connect("cuda", device_memory="1GB")


def test_ranks_bring_the_rows_that_they_will_be_asked_for():
    """Keys of a prepared batch are at their owners already, which exchange rows for them."""
    store = ShardedCudaStore(Connection(ConnectionSettings()), "cpu", (64 + 8) * 24)
    plain = Trained(CudaStore("cpu"), {"f": kv.Table(4)})
    one = Trained(store, {"f": kv.Table(4)})
    batches = [{"f": torch.arange(96)}, *zipf_batches(4, 8, 96, "cpu")]
    for step, batch in enumerate(batches):
        for following in batches[step + 1 : step + 2]:
            one.engine.prepare(following, training=True)
        if step == 2:
            before = one.engine.table("f").stats()
        assert torch.equal(plain.look_up(batch)[0], one.look_up(batch)[0])
        plain.train(step)
        one.train(step)
    after = one.engine.table("f").stats()
    assert after["tier_misses"] == before["tier_misses"]
    assert after["tier_hits"] > before["tier_hits"]
    assert_same_rows(plain.engine.table("f").snapshot(), one.engine.table("f").snapshot())
    assert store._tables._exchange._expected == []


def test_the_first_rows_of_a_layout_do_not_take_one_more_than_there_is_memory_for():
    """The counters that the host had read before the layout was there do not count the row of zeros."""
    store = CudaStore("cpu", 600)
    engine = kv.EmbeddingEngine({"f": kv.Table(2)}, store=store)
    kv.optim.SGD(engine, lr=1.0, momentum=0.5)  # another layout
    table = store.memory.tables["f"]
    store.memory.reserve(table.arena, {table: 10})
    assert table.arena.capacity >= 11


def test_a_store_that_nobody_holds_releases_its_memory_at_once():
    store = CudaStore("cpu", 600)
    store.add_table(kv.Table(4).spec("t", 0, 4))
    keys = np.arange(50)
    store.lookup({"t": (keys, np.ones(50, np.uint32))}, LookupContext(True, 1))
    assert store.table("t").stats()["host_bytes"] > 0
    memory = weakref.ref(store.memory.tables["t"].arena)
    del store
    assert memory() is None


@pytest.mark.slow
def test_nothing_depends_on_memory_that_was_never_written():
    kind = StoreKind("tiered cuda", make_tiered("cpu"), skips_rows=True, slow=True)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        suite = DeviceConformance()
        suite.test_nothing_depends_on_memory_that_was_never_written(
            kind, lambda: torch.use_deterministic_algorithms(True)
        )
    finally:
        torch.use_deterministic_algorithms(before)


def walk_with_captures(seed, length):
    store = CudaStore("cpu", 600)
    CaptureWalk(store, random.Random(seed)).run(length)
    check_locations(store)
    return sum(store.table(name).stats()["tier_exchanges"] for name in "abc")


def test_captures_are_read_while_rows_exchange_locations():
    assert walk_with_captures(seed=4, length=12) > 0


@pytest.mark.slow
def test_captures_are_read_while_rows_exchange_locations_many_times():
    for seed in range(10):
        walk_with_captures(seed, length=30)
