"""The store protocol: a store that only answers for distinct keys trains the same rows, bit for bit."""

import numpy as np
import pytest
import torch
from store_kinds import DistinctKeysStore

import karvan as kv
from karvan.embedding import HashStack
from karvan.ragged import IndexedRows
from karvan.store import MemoryStore, Rows, TableSpec

TABLES = {
    "user": kv.Table(16),
    "item": kv.Table(8, combiner="mean"),
    "seen": kv.Table(8, name="item", combiner="sequence", length=3),
    "path": kv.Table(8, name="item", combiner="index"),
    "tags": kv.Table(5, combiner="sqrtn", dtype=torch.bfloat16),
    "words": kv.Table(4, combiner="ragged", hash_stack=HashStack(2, 50)),
    "shop": kv.Table(4, evict=kv.eviction.LRU(capacity=20)),
}


def random_batch(rng, rows=64):
    def ragged(weights=False):
        lengths = rng.integers(0, 6, rows)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        values = torch.from_numpy(rng.integers(-40, 40, int(offsets[-1])))
        return kv.Ragged(values, offsets, torch.rand(len(values)) if weights else None)

    torch.manual_seed(int(rng.integers(1 << 30)))
    return {
        "user": torch.from_numpy(rng.integers(-40, 40, rows)),
        "item": ragged(weights=True),
        "seen": ragged(),
        "path": ragged(weights=True),
        "tags": ragged(),
        "words": ragged(),
        "shop": torch.from_numpy(rng.integers(0, 60, rows)),
    }


def outputs(out):
    for value in out.values():
        value = value.to_sequence() if isinstance(value, IndexedRows) else value
        yield value if isinstance(value, torch.Tensor) else value.values


@pytest.mark.parametrize("optimizer", [kv.optim.SGD, kv.optim.Adagrad, kv.optim.Adam, kv.optim.FTRL])
def test_a_store_of_distinct_keys_gives_the_same_bits_as_the_fused_one(optimizer):
    engines = [
        kv.EmbeddingEngine(TABLES, seed=3, store=store()) for store in (MemoryStore, DistinctKeysStore)
    ]
    optimizers = [optimizer(engine, lr=0.1) for engine in engines]
    rng = np.random.default_rng(0)
    for step in range(12):
        batches = [random_batch(rng) for _ in range(1 + step % 3)]  # some steps accumulate gradients
        factors = [[torch.randn(200, 1) for _ in TABLES] for _ in batches]
        for engine, opt in zip(engines, optimizers, strict=True):
            for batch, factor in zip(batches, factors, strict=True):
                out = engine(batch)
                loss = sum(
                    (
                        o.reshape(len(o), -1)
                        * f[: len(o) % 200 or 1].mean()
                        * (1 + o.detach().reshape(len(o), -1))
                    ).sum()
                    for o, f in zip(outputs(out), factor, strict=True)
                )
                loss.backward()
            if step == 5:
                engine.table("user").evict_keys([1, 2, 3])
            opt.step()
    for name in ("user", "item", "tags", "words", "shop"):
        fused, distinct = (engine.table(name).snapshot() for engine in engines)
        for part in Rows._fields:
            assert (getattr(fused, part) == getattr(distinct, part)).all(), (name, part)
    stats = [engine.table("user").stats() for engine in engines]
    assert stats[0]["dropped_gradients"] == stats[1]["dropped_gradients"] > 0


def test_a_table_whose_gradient_is_not_finite_is_skipped_on_any_store():
    engine = kv.EmbeddingEngine({"a": kv.Table(4), "b": kv.Table(4)}, store=DistinctKeysStore())
    opt = kv.optim.SGD(engine, lr=1.0)
    out = engine({"a": torch.tensor([1]), "b": torch.tensor([1])})
    before = [engine.table(t).vectors([1]) for t in "ab"]
    (out["a"].sum() * float("nan") + out["b"].sum()).backward()
    opt.step()
    assert torch.equal(engine.table("a").vectors([1]), before[0])
    torch.testing.assert_close(engine.table("b").vectors([1]), before[1] - 1.0)
    assert [engine.table(t).stats()["skipped_updates"] for t in "ab"] == [1, 0]


def test_one_store_serves_two_engines():
    store = MemoryStore()
    first, second = (kv.EmbeddingEngine({"a": kv.Table(4)}, store=store) for _ in range(2))
    first({"a": torch.tensor([7])})
    assert second.table("a").rows == 1
    with pytest.raises(ValueError, match="'a'"):
        kv.EmbeddingEngine({"a": kv.Table(8)}, store=store)


def test_snapshot_parts_make_up_the_whole_and_load_elsewhere():
    engine = kv.EmbeddingEngine({"a": kv.Table(4)})
    kv.optim.Adagrad(engine)
    engine({"a": torch.arange(-500, 500)})
    whole = engine.table("a").snapshot()
    parts = [engine.table("a").snapshot(part, 7) for part in range(7)]
    for field in Rows._fields:
        assert (np.concatenate([getattr(p, field) for p in parts]) == getattr(whole, field)).all()
    other = kv.EmbeddingEngine({"a": kv.Table(4)}, shards=1)
    kv.optim.Adagrad(other)
    for part in parts:
        other.table("a").load(part)
    for mine, theirs in zip(other.table("a").snapshot(), whole, strict=True):
        assert (mine == theirs).all()
    with pytest.raises(ValueError, match="part"):
        engine.table("a").snapshot(7, 7)
    with pytest.raises(ValueError, match="twice"):
        other.table("a").load(Rows(*(np.concatenate([x, x]) for x in whole)))


@pytest.mark.parametrize("capacity", [1, 5, 100, 101])
def test_the_rows_that_a_policy_allows_are_shared_out_whole(capacity):
    for kind in ("lru", "lfu"):
        spec = TableSpec("t", 2, "float32", ("zeros", 0, 0, 0, 0), ("all", 0, 0), (kind, capacity, 1), 0, 1)
        for holders in (1, 2, 3, 4):
            parts = [spec.share(holder, holders).evict[1] for holder in range(holders)]
            assert sum(parts) == max(capacity, holders)
            assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("init", [kv.init.Uniform(-0.3, 0.3), kv.init.Normal(), kv.init.XavierUniform()])
def test_a_spec_tells_the_vectors_with_which_rows_start(init):
    engine = kv.EmbeddingEngine({"a": kv.Table(5, init=init)}, seed=-3)
    keys = np.array([7, -1, 2**62, 0])
    engine({"a": torch.from_numpy(keys)})
    handle = engine.table("a")
    assert (handle.spec.initial_vectors(keys) == handle.vectors(torch.from_numpy(keys)).numpy()).all()
