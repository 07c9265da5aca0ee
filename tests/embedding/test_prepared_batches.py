"""Batches that are grouped ahead: the same bits, whatever was prepared, and nothing stale."""

import threading
import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.embedding import HashStack
from karvan.ragged import Padded


def make_engine():
    tables = {
        "user": kv.Table(4),
        "items": kv.Table(4, name="item", combiner="mean"),
        "item": kv.Table(4),
        "history": kv.Table(4, name="item", combiner="sequence", length=2),
        "stacked": kv.Table(4, hash_stack=HashStack(2, 50)),
        "index": kv.Table(4, name="item", combiner="index"),
    }
    engine = kv.EmbeddingEngine(tables)
    return engine, kv.optim.Adagrad(engine, lr=0.1)


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(1, 9, (1,), generator=generator))
    lengths = torch.randint(0, 4, (rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(0, 30, (int(offsets[-1]),), generator=generator)
    ids = torch.randint(0, 30, (3, rows), generator=generator)
    return kv.Batch(
        {
            "user": ids[0],
            "item": ids[1],
            "stacked": ids[2],
            "items": kv.Ragged(values, offsets, torch.ones(len(values))),
            "history": kv.Ragged(values, offsets),
            "index": kv.Ragged(values, offsets),
        }
    )


def step(engine, optimizer, batch):
    out = engine(batch)
    out["index"] = out["index"].to_sequence()
    tensors = [v.values if isinstance(v, Padded) else v for v in out.values()]
    sum((t * t).sum() for t in tensors).backward()
    optimizer.step()
    return [t.detach().clone() for t in tensors]


def rows_of(engine):
    return [array for table in engine.tables() for array in table.snapshot()]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=12))
def test_prepared_batches_give_the_same_bits(steps):
    plain, ahead = make_engine(), make_engine()
    for seed, prepared, again in steps:
        batch = make_batch(seed)
        if prepared:
            thread = threading.Thread(target=lambda b=batch: ahead[0].prepare(b))
            thread.start()
            thread.join()
        for _ in range(1 + again):  # what was prepared is good for one forward; then it goes on without
            for one, other in zip(step(*plain, batch), step(*ahead, batch), strict=True):
                assert torch.equal(one, other)
    for one, other in zip(rows_of(plain[0]), rows_of(ahead[0]), strict=True):
        assert (one == other).all()


def test_ids_that_were_changed_since_are_looked_up_as_they_are():
    engine, optimizer = make_engine()
    batch = make_batch(1)
    assert engine.prepare(batch)
    batch["user"].add_(1000)
    step(engine, optimizer, batch)
    assert set(engine.table("user").keys().tolist()) == set(batch["user"].tolist())


def test_evaluation_uses_what_was_prepared_and_inserts_nothing():
    engine, optimizer = make_engine()
    batch = make_batch(2)
    step(engine, optimizer, batch)
    engine.eval()
    expected = engine(batch)["user"]
    assert engine.prepare(batch)
    assert torch.equal(engine(batch)["user"], expected)


def test_a_batch_without_all_features_or_with_faults_is_left_to_its_forward():
    engine, _ = make_engine()
    assert not engine.prepare({"user": torch.tensor([1])})
    faulty = {**make_batch(3), "user": torch.tensor([1.0])}
    assert not engine.prepare(faulty)


def test_batches_that_are_never_used_are_released():
    plain, ahead = make_engine(), make_engine()
    unused = []
    for seed in range(50):
        batch = make_batch(seed)
        assert ahead[0].prepare(batch)
        unused.append(weakref.ref(batch["user"]))
    batch = make_batch(50)
    assert ahead[0].prepare(batch)
    assert sum(each() is not None for each in unused) < 10  # the engine holds a few of the newest
    for one, other in zip(step(*plain, batch), step(*ahead, batch), strict=True):
        assert torch.equal(one, other)
    assert ahead[0].table("user").rows == len(set(batch["user"].tolist()))  # the others were not looked up
