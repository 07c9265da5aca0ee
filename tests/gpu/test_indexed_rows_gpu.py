"""The combiner "index" on a GPU trains what "sequence" trains, wherever the ids are and were prepared."""

import threading

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import karvan as kv
from karvan.embedding import HashStack
from karvan.store.cuda.store import CudaStore


def engine_of(combiner, length, stack):
    options = {"name": "t", "init": kv.init.Uniform(-0.3, 0.3), "hash_stack": stack}
    tables = {"f": kv.Table(16, combiner=combiner, length=length, **options), "g": kv.Table(16, **options)}
    engine = kv.EmbeddingEngine(tables, seed=1, store=CudaStore("cuda"))
    return engine, kv.optim.Adagrad(engine, lr=0.1)


def batch_of(place, weighted, rows=300):
    """Few ids occur often, some of them more than 256 times."""
    offsets = torch.nn.functional.pad(torch.randint(0, 40, (rows,)).cumsum(0), (1, 0))
    values = (torch.rand(int(offsets[-1])) ** 3 * 500).long() - 50
    ids = kv.Ragged(values, offsets, torch.rand(len(values)) if weighted else None)
    return {"f": ids.to(place), "g": torch.randint(-50, 450, (rows,)).to(place)}


def prepare_beside(engine, batch):
    """Prepare a batch on a thread and a stream of their own."""
    torch.cuda.synchronize()

    def prepare():
        with torch.cuda.stream(torch.cuda.Stream()):
            assert engine.prepare(batch, training=True)

    thread = threading.Thread(target=prepare)
    thread.start()
    thread.join()


@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("length", "weighted", "ahead", "stack"),
    [
        (None, False, False, None),
        (20, True, False, None),
        (20, False, True, None),
        (None, True, True, None),
        (10, False, False, HashStack(2, 200)),
    ],
)
def test_it_trains_what_sequence_trains(place, length, weighted, ahead, stack):
    torch.manual_seed(0)
    trained = [engine_of(combiner, length, stack) for combiner in ("sequence", "index")]
    plain, indexed = (engine for engine, _ in trained)
    for step in range(6):
        batch = batch_of(place, weighted)
        if ahead:
            prepare_beside(indexed, batch)
        expected, made = plain(batch), indexed(batch)
        sequence = made["f"].to_sequence()
        torch.testing.assert_close(sequence.values, expected["f"].values, rtol=1e-5, atol=1e-6)
        assert torch.equal(sequence.mask, expected["f"].mask)
        assert made["f"].index.device == made["f"].vectors.device
        gradient = torch.randint(-4, 5, sequence.values.shape).to(sequence.values.device)
        for values, outputs in ((expected["f"].values, expected), (sequence.values, made)):
            ((values * gradient).sum() + outputs["g"].sum()).backward()
        if step % 2:
            for _, optimizer in trained:
                optimizer.step()
    one, other = (engine.table("t").snapshot() for engine in (plain, indexed))
    orders = one.keys.argsort(), other.keys.argsort()
    for name in ("keys", "counts"):
        mine, theirs = (getattr(rows, name)[order] for rows, order in zip((one, other), orders, strict=True))
        assert mine.tolist() == theirs.tolist()
    vectors = [torch.from_numpy(rows.vectors[o]) for rows, o in zip((one, other), orders, strict=True)]
    torch.testing.assert_close(*vectors, rtol=1e-4, atol=1e-5)
    assert max(one.counts) > 256


def test_evaluation_gives_zeros_for_unknown_ids_and_inserts_nothing():
    engine, _ = engine_of("index", None, None)
    engine(batch_of("cuda", weighted=False))
    rows = engine.table("t").rows
    engine.eval()
    made = engine({"f": torch.tensor([10**9, 5]).cuda(), "g": torch.tensor([1, 1]).cuda()})["f"]
    assert made.index.tolist() == [[2], [1]]
    assert not made.vectors[2].any()
    assert engine.table("t").rows == rows
