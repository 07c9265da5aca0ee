"""Tables in memory and tables on a device in one engine train what tables in memory train."""

import pytest
import torch

import karvan as kv
from karvan.store import MemoryStore
from karvan.store.cuda.placed import PlacedStore
from karvan.store.cuda.store import CudaStore

TABLES = {
    "user": kv.Table(4),
    "item": kv.Table(4, combiner="mean"),
    "seen": kv.Table(4, combiner="sequence", name="item"),
    "path": kv.Table(4, combiner="index", name="user"),
    "seen path": kv.Table(4, combiner="index", name="item", length=2),
    "shop": kv.Table(3, evict=kv.eviction.LRU(capacity=10)),
}
PLACES = {"user": "cpu", "item": "cuda", "shop": "cpu"}


def random_batch():
    def ragged():
        lists = [torch.randint(0, 12, (int(n),)).tolist() for n in torch.randint(0, 4, (20,))]
        return kv.Ragged.from_lists(lists)

    return {
        "user": torch.randint(-9, 9, (20,)),
        "item": ragged(),
        "seen": ragged(),
        "path": ragged(),
        "seen path": ragged(),
        "shop": torch.randint(0, 15, (20,)),
    }


def placed():
    return PlacedStore(MemoryStore(), CudaStore("cpu"), PLACES)


def train(engines, steps):
    """Train the same batches on all engines, in every second step with two passes."""
    optimizers = [kv.optim.Adam(engine, lr=0.1) for engine in engines]
    torch.manual_seed(0)
    for step in range(steps):
        batches = [random_batch() for _ in range(1 + step % 2)]
        for engine, optimizer in zip(engines, optimizers, strict=True):
            for batch in batches:
                out = engine(batch)
                loss = out["user"].square().sum() + out["item"].sum() + out["seen"].values.sin().sum()
                paths = [out[name].to_sequence().values.sin().sum() for name in ("path", "seen path")]
                (loss + out["shop"].sum() + sum(paths)).backward()
            optimizer.step()
    return out


def assert_same_rows(one, other):
    for name in PLACES:
        mine, theirs = one.table(name).snapshot(), other.table(name).snapshot()
        assert mine.keys.tolist() == theirs.keys.tolist()
        assert mine.counts.tolist() == theirs.counts.tolist()
        for what in ("vectors", "state"):
            torch.testing.assert_close(
                torch.from_numpy(getattr(mine, what)), torch.from_numpy(getattr(theirs, what))
            )


def test_both_kinds_of_tables_train_as_in_memory():
    engines = [kv.EmbeddingEngine(TABLES, seed=2, store=store) for store in (MemoryStore(), placed())]
    train(engines, 4)
    assert_same_rows(*engines)
    stats = {name: engines[1].table(name).stats() for name in PLACES}
    assert stats["item"]["device_bytes"] > 0
    assert stats["shop"]["evicted"] == engines[0].table("shop").stats()["evicted"] > 0


def test_a_checkpoint_of_both_kinds_is_loaded_in_memory_and_the_other_way_round(tmp_path):
    mixed = kv.EmbeddingEngine(TABLES, seed=2, store=placed())
    train([mixed], 2)
    kv.checkpoint.save(tmp_path / "mixed", {}, mixed)
    memory = kv.EmbeddingEngine(TABLES, seed=9)
    kv.optim.Adam(memory)
    kv.checkpoint.find(tmp_path / "mixed").load(memory)
    assert_same_rows(mixed, memory)
    kv.checkpoint.save(tmp_path / "memory", {}, memory)
    again = kv.EmbeddingEngine(TABLES, seed=9, store=placed())
    kv.optim.Adam(again)
    kv.checkpoint.find(tmp_path / "memory").load(again)
    assert_same_rows(again, mixed)


def test_a_gradient_that_is_not_finite_is_seen_in_both_kinds():
    engine = kv.EmbeddingEngine(TABLES, store=placed())
    optimizer = kv.optim.SGD(engine, lr=1.0)
    out = engine(random_batch())
    (out["user"].sum() * float("inf")).backward()
    assert not optimizer.gradients_finite()
    optimizer.zero_grad()
    (engine(random_batch())["item"].sum() * float("nan")).backward()
    assert not optimizer.gradients_finite()
    optimizer.zero_grad()
    engine(random_batch())["item"].sum().backward()
    assert optimizer.gradients_finite()


def test_an_evaluation_inserts_nothing():
    engine = kv.EmbeddingEngine(TABLES, store=placed()).eval()
    out = engine(random_batch())
    assert not out["user"].any()
    assert not out["item"].any()
    assert engine.sizes() == {"user": 0, "item": 0, "shop": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_what_is_missing():
    with pytest.raises(
        ValueError, match=r'connect\("cuda"\) expects a GPU and a torch .* torch.version.cuda'
    ):
        kv.connect("cuda")
    with pytest.raises(ValueError, match=r'Table\(device="cuda"\) of a expects a GPU'):
        kv.EmbeddingEngine({"a": kv.Table(4, device="cuda"), "b": kv.Table(4)})
    with pytest.raises(ValueError, match="device 'cpu', 'cuda' or None, got 'gpu'"):
        kv.Table(4, device="gpu")
    with pytest.raises(ValueError, match="a store, or tables with a device, got both: a"):
        kv.EmbeddingEngine({"a": kv.Table(4, device="cpu")}, store=MemoryStore())
    with pytest.raises(ValueError, match=r'timeout and transport are for connect.*got "cuda"'):
        kv.connect("cuda", timeout=3.0)
    with pytest.raises(ValueError, match=r'connect\("sharded", device="cuda"\) expects a GPU'):
        kv.connect("sharded", device="cuda")
    with pytest.raises(ValueError, match=r'is for connect\("sharded"\), got connect\("memory"\)'):
        kv.connect("memory", device="cuda")
    with pytest.raises(ValueError, match="device must be one of cpu, cuda, got 'gpu'"):
        kv.connect("sharded", device="gpu")


def test_features_that_share_rows_share_their_device():
    with pytest.raises(ValueError, match="Table 'a' has device cpu, but feature 'b' asks for None"):
        kv.EmbeddingEngine({"a": kv.Table(4, device="cpu"), "b": kv.Table(4, name="a")})
