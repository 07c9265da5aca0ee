"""Captures of tables on a device while training goes on, in Triton's interpreter; tests/gpu has a GPU's."""

import gc
import random
import threading

import numpy as np
import pytest
import torch
from capture_conformance import read
from capture_walk import SPECS, CaptureWalk, as_dict
from rows_conformance import assert_same_rows
from store_kinds import explore

import karvan as kv
from karvan.store import LookupContext, MemoryStore, Push, Rule
from karvan.store.cuda import captures, contents
from karvan.store.cuda.store import CudaStore


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    """Several gathers for a part, and several chunks of saved rows."""
    monkeypatch.setattr(contents, "_STAGED_BYTES", 1)
    monkeypatch.setattr(captures, "_LEAST_ROWS", 4)
    monkeypatch.setattr(captures, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(captures, "_MOST_BYTES", 300)


def walk(length):
    return lambda source: CaptureWalk(CudaStore("cpu"), source).run(length)


def test_captures_among_changes_of_every_kind():
    explore(walk(12), 2, shrink=False)


@pytest.mark.slow
def test_captures_among_many_changes():
    for seed in range(40):
        walk(40)(random.Random(seed))


TABLES = {
    "plain": kv.Table(4),
    "same layout": kv.Table(4, evict=kv.eviction.LRU(50)),
    "half": kv.Table(3, dtype=torch.bfloat16),
}


def make_engine():
    engine = kv.EmbeddingEngine(TABLES, store=CudaStore("cpu"))
    return engine, kv.optim.Adam(engine, lr=0.1)


def train(engine, optimizer, seed):
    keys = torch.randint(0, 90, (3, 30), generator=torch.Generator().manual_seed(seed))
    out = engine(dict(zip(TABLES, keys, strict=True)))
    sum(each.square().sum() for each in out.values()).backward()
    optimizer.step()


def snapshots(engine):
    return {name: as_dict(engine.store.table(name).snapshot()) for name in TABLES}


def test_a_thread_reads_while_another_trains():
    engine, optimizer = make_engine()
    train(engine, optimizer, 0)
    expected = snapshots(engine)
    capture = engine.store.capture(list(TABLES), dict.fromkeys(TABLES, 4))
    found = {name: {} for name in TABLES}
    began, may_end = threading.Event(), threading.Event()

    def read_all():
        for name in reversed(TABLES):
            for part in range(4):
                found[name] |= as_dict(capture.part(name, part))
                began.set()
                if part == 1:
                    may_end.wait()

    thread = threading.Thread(target=read_all)
    thread.start()
    assert began.wait(60)
    for seed in range(3):
        train(engine, optimizer, 10 + seed)
        may_end.set()
    thread.join()
    capture.close()
    assert found == expected
    assert snapshots(engine) != expected


def test_a_checkpoint_written_while_training_continues(tmp_path):
    engine, optimizer = make_engine()
    other = kv.EmbeddingEngine(TABLES, store=MemoryStore())
    kv.optim.Adam(other, lr=0.1)
    saves = kv.checkpoint.Checkpoints(tmp_path, full_every=2)
    for step in range(2):  # a full one and a delta
        train(engine, optimizer, step)
        expected = snapshots(engine)
        pending = saves.save(step + 1, {}, engine)
        train(engine, optimizer, 10 + step)
        engine.table("plain").evict_keys(range(20))
        engine.table("half").clear()
        pending.wait()
        kv.checkpoint.find(tmp_path).load(other)
        assert snapshots(other) == expected


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_lookups_before_the_capture(passes):
    """Rows are as they were before the update; their uses include the lookup."""
    engine, optimizer = make_engine()
    train(engine, optimizer, 0)
    for seed in range(passes):
        keys = torch.arange(20) + 10 * seed
        out = engine(dict.fromkeys(TABLES, keys))
        sum(each.sum() for each in out.values()).backward()
    expected = snapshots(engine)
    capture = engine.store.capture(list(TABLES), dict.fromkeys(TABLES, 1))
    optimizer.step()
    for name in TABLES:
        assert as_dict(capture.part(name, 0)) == expected[name]
    capture.close()
    assert snapshots(engine) != expected


def test_only_rows_that_change_before_they_are_read_are_saved():
    store = CudaStore("cpu")
    walk = CaptureWalk(store, random.Random(0))
    capture = store.capture(["a", "b", "c"], {"a": 1, "b": 1, "c": 1})
    walk.look()  # changes uses only
    assert capture.saved_bytes == 0
    watchers = store.memory.tables["a"].arena.watchers
    for name in "ab":
        capture.part(name, 0)
    assert len(watchers) == 1
    assert store.memory.tables["a"].arena.watchers == ()  # updates are as cheap as before again
    assert len(store.memory.tables["c"].arena.watchers) == 1
    walk.update()
    assert 0 < capture.saved_bytes < 1000
    capture.close()
    assert store.memory.tables["c"].arena.watchers == ()


def test_training_limits_the_page_locked_memory_of_rows_that_nobody_reads():
    store = CudaStore("cpu")
    store.add_table(SPECS["a"])
    keys = np.arange(600)
    ones = np.ones(100, np.uint32)
    store.lookup({"a": (keys, np.ones(600, np.uint32))}, LookupContext(True, 1))
    expected = store.table("a").snapshot()
    capture = store.capture(["a"], {"a": 4})
    rule = Rule("sgd")
    rule.lr = 1.0
    for first in range(0, 600, 100):
        some = keys[first : first + 100]
        found = store.lookup({"a": (some, ones)}, LookupContext(True, 2))["a"]
        push = Push(some, np.ones((100, 2), np.float32), found.version)
        store.apply({"a": [push]}, {"a": rule}, {"a": 2})
        assert 0 < capture.saved_bytes < 20 * (128 + 8)  # of a batch, of all rows 12,000
    assert_same_rows(read(capture, 4, "a"), expected)
    capture.close()


def test_a_capture_that_is_forgotten_ends():
    store = CudaStore("cpu")
    walk = CaptureWalk(store, random.Random(0))
    capture = store.capture(["a"], {"a": 1})
    del capture
    gc.collect()
    assert store.memory.tables["a"].arena.watchers == ()
    expected = store.table("a").snapshot()
    capture = store.capture(["a"], {"a": 2})
    walk.look()
    walk.update()
    assert_same_rows(read(capture, 2, "a"), expected)
    capture.close()


def test_a_save_that_fails_holds_nothing(monkeypatch):
    """Such as one without memory: the update fails, the rows are as they were, and both can be repeated."""
    store = CudaStore("cpu")
    walk = CaptureWalk(store, random.Random(0))
    walk.look()
    expected = store.table("a").snapshot()
    capture = store.capture(["a"], {"a": 1})
    flight = list(walk.in_flight)
    with monkeypatch.context() as patch:

        def fail(self, rows):
            raise MemoryError("no page-locked memory")

        patch.setattr(captures.SavedRows, "reserve", fail)
        with pytest.raises(MemoryError):
            walk.update()
    assert_same_rows(store.table("a").snapshot(), expected)
    walk.in_flight = flight
    walk.update()
    assert_same_rows(capture.part("a", 0), expected)
    capture.close()
    assert not np.array_equal(store.table("a").snapshot().vectors, expected.vectors)
