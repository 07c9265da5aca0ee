"""A machine with only torch, triton and numpy: what needs no more works, the rest says what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import bare_machine
import numpy as np
import pytest
import torch
from dict_store import DictStore

import karvan as kv
from karvan import native
from karvan.embedding import HashStack
from karvan.native import NativeCoreError
from karvan.ragged import IndexedRows
from karvan.store import MemoryStore


@pytest.fixture(scope="module")
def printed():
    """What a program prints that finds nothing else to import."""
    root = Path(kv.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, bare_machine.__file__], env={"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_an_engine_trains_there_as_it_does_here(printed):
    expected = bare_machine.train(MemoryStore())
    assert printed["trained"].keys() == expected.keys()
    for name, vectors in expected.items():
        np.testing.assert_allclose(printed["trained"][name], vectors, rtol=1e-5, atol=1e-6)


def test_whatever_needs_the_native_core_says_so(printed):
    for name, error in printed["errors"].items():
        assert error.startswith("NativeCoreError: This needs Karvan's native core, karvan._native, "), name
        assert "which is not built here: install the package with pip install karvan" in error, name


def test_a_native_core_that_cannot_be_loaded_says_why():
    missing = native._MissingCore(ImportError("libstdc++.so.6: version `GLIBCXX_3.4.32' not found"))
    with pytest.raises(NativeCoreError, match=r"cannot be loaded here \(libstdc\+\+.so.6: version"):
        _ = missing.Table


START = {"init": kv.init.Constant(0.25)}
TABLES = {
    "user": kv.Table(6, **START),
    "item": kv.Table(4, combiner="mean", **START),
    "seen": kv.Table(4, name="item", combiner="sequence", length=3, **START),
    "last": kv.Table(4, name="item", combiner="sequence", **START),
    "index": kv.Table(4, name="item", combiner="index", **START),
    "tags": kv.Table(5, combiner="sqrtn", **START),
    "path": kv.Table(3, combiner="tile", length=2, **START),
    "words": kv.Table(4, combiner="ragged", hash_stack=HashStack(2, 50), **START),
}


def random_batch(rng, rows=12):
    def ragged():
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(rng.integers(0, 6, rows))]))
        values = torch.from_numpy(rng.integers(-20, 20, int(offsets[-1])))
        weights = torch.from_numpy(rng.uniform(0.5, 1.5, len(values))) if rng.integers(2) else None
        return kv.Ragged(values, offsets, weights)

    return {name: ragged() for name in TABLES} | {"user": torch.from_numpy(rng.integers(-20, 20, rows))}


def outputs(out):
    made = [value.to_sequence() if isinstance(value, IndexedRows) else value for value in out.values()]
    return [value if isinstance(value, torch.Tensor) else value.values for value in made]


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("optimizer", [kv.optim.SGD, kv.optim.Adam])
def test_a_store_that_takes_tensors_trains_the_same_rows(optimizer, prepare):
    engines = [kv.EmbeddingEngine(TABLES, store=store()) for store in (MemoryStore, DictStore)]
    optimizers = [optimizer(engine, lr=0.05) for engine in engines]
    rng = np.random.default_rng(7)
    for step in range(6):
        for _ in range(1 + step % 2):  # some steps accumulate gradients
            batch = random_batch(rng)
            if prepare:
                assert all(engine.prepare(batch, training=True) for engine in engines)
            made = [outputs(engine(batch)) for engine in engines]
            for mine, theirs in zip(*made, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            for each in made:
                sum(
                    (out * (at + 1)).square().mean() for at, out in enumerate(each) if at % 3 != step % 3
                ).backward()
        if step == 3:
            assert len({engine.table("item").evict_keys(torch.arange(3)) for engine in engines}) == 1
        for each in optimizers:
            each.step()
    for handle in engines[0].tables():
        mine, theirs = handle.snapshot(), engines[1].table(handle.name).snapshot()
        order = np.argsort(mine.keys)
        for field, array in zip(mine._fields, mine, strict=True):
            np.testing.assert_allclose(array[order], getattr(theirs, field), rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_not_finite_is_skipped_by_such_a_store_too():
    engine = kv.EmbeddingEngine({"f": kv.Table(2, **START)}, store=DictStore())
    optimizer = kv.optim.Adam(engine)
    (engine({"f": torch.tensor([1, 2])})["f"] * torch.inf).sum().backward()
    optimizer.step()
    assert engine.table("f").stats()["skipped_updates"] == 1
    assert engine.table("f").vectors([1, 2]).tolist() == [[0.25, 0.25]] * 2
