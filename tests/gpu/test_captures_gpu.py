"""Captures on a GPU: rows are copied in the background while steps, some of them CUDA graphs, change them."""

import random
import threading
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from capture_walk import CaptureWalk, as_dict
from rows_conformance import assert_same_rows

import karvan as kv
from karvan.store.cuda import captures, contents
from karvan.store.cuda.store import CudaStore

BATCH = 4096


@pytest.mark.parametrize("seed", range(8))
def test_captures_among_changes_of_every_kind(monkeypatch, seed):
    monkeypatch.setattr(contents, "_STAGED_BYTES", 1)
    monkeypatch.setattr(captures, "_LEAST_ROWS", 4)
    monkeypatch.setattr(captures, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(captures, "_MOST_BYTES", 300)
    CaptureWalk(CudaStore("cuda"), random.Random(seed)).run(60)


def make_engine(rows, dim=64):
    """Two tables of one layout and one of 16 bits, with so many rows each."""
    tables = {"x": kv.Table(dim), "y": kv.Table(dim), "half": kv.Table(dim, dtype=torch.bfloat16)}
    engine = kv.EmbeddingEngine(tables, store=CudaStore("cuda"))
    optimizer = kv.optim.Adam(engine, lr=0.1)
    for first in range(0, rows, 1 << 18):
        keys = torch.arange(first, min(rows, first + (1 << 18)), device="cuda")
        engine(dict.fromkeys(tables, keys))
    return engine, optimizer


def train(engine, optimizer, seed, rows):
    generator = torch.Generator("cuda").manual_seed(seed)
    keys = {
        handle.name: torch.randint(0, rows, (BATCH,), device="cuda", generator=generator)
        for handle in engine.tables()
    }
    out = engine(keys)
    sum(each.square().sum() for each in out.values()).backward()
    optimizer.step()


@pytest.mark.parametrize("stream", ["default", "own"])
def test_a_thread_reads_while_another_trains(monkeypatch, stream):
    """Steps are replays of graphs from the third on; many gathers come between them."""
    monkeypatch.setattr(contents, "_STAGED_BYTES", 1 << 20)
    monkeypatch.setattr(captures, "_MOST_BYTES", 20 << 20)
    rows = 100_000
    own = torch.cuda.current_stream() if stream == "default" else torch.cuda.Stream()
    with torch.cuda.stream(own):
        engine, optimizer = make_engine(rows)
        for seed in range(5):
            train(engine, optimizer, seed, rows)
        names = [handle.name for handle in engine.tables()]
        for turn in range(3):
            expected = {name: engine.store.table(name).snapshot() for name in names}
            capture = engine.store.capture(names, dict.fromkeys(names, 8))
            found = {name: [] for name in names}

            def read_all(capture=capture, found=found):
                for part in range(8):
                    for name, parts in found.items():
                        parts.append(as_dict(capture.part(name, part)))

            thread = threading.Thread(target=read_all)
            thread.start()
            steps = 0
            while thread.is_alive() or steps < 20:
                train(engine, optimizer, 1000 * (turn + 1) + steps, rows)
                steps += 1
                if steps == 10:
                    engine.table("x").evict_keys(range(0, rows, 3))
            thread.join()
            capture.close()
            for name in names:
                merged = {key: row for part in found[name] for key, row in part.items()}
                assert merged == as_dict(expected[name])


def test_a_capture_copies_no_rows_at_once():
    """It takes little of the time of a snapshot, and of the memory of the rows."""
    rows = 1_000_000
    engine, optimizer = make_engine(rows, dim=128)
    train(engine, optimizer, 0, rows)
    store = engine.store
    for last in (False, True):  # kernels are compiled the first time
        began = time.perf_counter()
        whole = store.table("x").snapshot()
        copied = time.perf_counter() - began
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        capture = store.capture(["x"], {"x": 1})
        captured = time.perf_counter() - began
        taken = torch.cuda.memory_allocated() - before
        if not last:
            capture.close()
    assert captured < copied / 4, (captured, copied)
    assert taken < 40 * rows, taken  # a row has 1,536 bytes
    assert capture.saved_bytes == 0
    assert_same_rows(capture.part("x", 0), whole)
    capture.close()


def test_steps_wait_for_nothing_while_a_capture_is_open():
    rows = 50_000
    engine, optimizer = make_engine(rows)
    for seed in range(4):
        train(engine, optimizer, seed, rows)
    expected = engine.store.table("x").snapshot()
    capture = engine.store.capture(["x", "y", "half"], {"x": 1, "y": 1, "half": 1})
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(4, 10):
            train(engine, optimizer, seed, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_rows(capture.part("x", 0), expected)
    capture.close()


def test_memory_is_free_again_after_a_capture():
    rows = 50_000
    engine, optimizer = make_engine(rows)
    train(engine, optimizer, 0, rows)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        capture = engine.store.capture(["x"], {"x": 2})
        capture.part("x", 0)
        train(engine, optimizer, 1, rows)
        capture.close()
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 16 << 20
    assert engine.table("x").stats()["rows"] == rows
