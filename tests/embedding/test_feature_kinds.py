"""Features of engines that are not one list of ids for each sample of a table that they train."""

import dataclasses

import pytest
import torch
from feature_helpers import nested
from hypothesis import given, settings
from hypothesis import strategies as st

import karvan as kv
from karvan.embedding import HashStack
from karvan.ragged import REFERENCE, IdsReference, NestedRagged

KEYS = st.integers(-3, 3) | st.integers(-(1 << 63), (1 << 63) - 1)


def _rows(engine, name):
    return [column.tolist() for column in engine.table(name).snapshot()]


@settings(max_examples=5)
@given(
    st.lists(st.lists(st.lists(KEYS, max_size=3), max_size=3), max_size=4),
    st.sampled_from(["sum", "mean", "sqrtn"]),
)
def test_lists_of_lists_give_the_vectors_of_their_lists(lists, combiner):
    engine, plain = (kv.EmbeddingEngine({"x": kv.Table(3, combiner=combiner)}, seed=1) for _ in range(2))
    sparse, expected = (kv.optim.Adagrad(each, lr=0.1) for each in (engine, plain))
    deep, flat = nested(lists), kv.Ragged.from_lists([values for row in lists for values in row])
    for _ in range(2):
        made, wanted = engine({"x": deep})["x"], plain({"x": flat})["x"]
        assert isinstance(made, kv.Ragged)
        assert torch.equal(made.values, wanted)
        assert torch.equal(made.lengths(), deep.lengths())
        for output, optimizer in ((made.values, sparse), (wanted, expected)):
            output.square().sum().backward()
            optimizer.step()
    assert _rows(engine, "x") == _rows(plain, "x")


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (2, 3, 1)])
def test_ids_of_three_dimensions_give_a_vector_for_each_list(shape):
    engine = kv.EmbeddingEngine({"x": kv.Table(4), "y": kv.Table(2)})
    batch = {"x": torch.zeros(shape, dtype=torch.int64), "y": torch.zeros(shape[0], dtype=torch.int64)}
    assert engine.prepare(batch, training=True)
    made = engine(batch)
    assert made["x"].shape == (*shape[:2], 4)
    assert made["y"].shape == (shape[0], 2)
    made["x"].sum().backward()


def test_what_lists_of_lists_cannot_be():
    engine = kv.EmbeddingEngine({"x": kv.Table(4, combiner="sequence")})
    with pytest.raises(
        ValueError, match="expected a list of ids for each sample with the combiner 'sequence'"
    ):
        engine({"x": torch.zeros(2, 3, 1, dtype=torch.int64)})
    engine = kv.EmbeddingEngine({"x": kv.Table(4), "y": kv.Table(4)})
    with pytest.raises(ValueError, match="expected 2 samples like feature 'x', got 6"):
        engine({"x": torch.zeros(2, 3, 1, dtype=torch.int64), "y": torch.zeros(6, dtype=torch.int64)})
    wrong = NestedRagged(torch.zeros(2, dtype=torch.int64), torch.arange(3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="outer offsets from 0 to 2 lists"):
        engine({"x": wrong, "y": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(ValueError, match="ids of 1 to 3 dimensions"):
        engine({"x": torch.zeros(1, 1, 1, 1, dtype=torch.int64)})


def test_a_feature_that_reads_alone_has_no_gradient_and_is_replayed_and_prepared_like_others():
    tables = {"seen": kv.Table(2, name="item", read_only=True), "item": kv.Table(2)}
    engine, plain = kv.EmbeddingEngine(tables), kv.EmbeddingEngine({"item": tables["item"]})
    sparse, expected = (kv.optim.Adagrad(each, lr=0.1) for each in (engine, plain))
    batch = {"item": torch.tensor([1, 2]), "seen": torch.tensor([2, 9])}
    for step in range(3):
        assert engine.prepare(batch, training=True)
        assert not engine.prepare(batch)
        engine.replay.record()
        for again in range(2):
            made = engine(batch)
            assert not made["seen"].requires_grad
            assert torch.equal(made["seen"][0], made["item"][1].detach())
            if not again:
                engine.replay.replay()
        engine.replay.end()
        (made["item"].sum() + made["seen"].sum()).backward()
        sparse.step()
        plain(batch)["item"].sum().backward()
        expected.step()
        assert engine.step == plain.step == step + 1
    assert _rows(engine, "item") == _rows(plain, "item")
    with torch.no_grad():
        assert torch.equal(engine(batch)["item"], plain(batch)["item"])


def test_an_engine_that_reads_alone_creates_no_rows():
    engine = kv.EmbeddingEngine({"x": kv.Table(2, read_only=True)})
    assert not engine({"x": torch.tensor([1, 2])})["x"].any()
    assert engine.sizes() == {"x": 0}
    assert engine.step == 0


def test_features_that_read_alone_need_their_ids():
    engine = kv.EmbeddingEngine({"x": kv.Table(2, read_only=True), "y": kv.Table(2)})
    with pytest.raises(ValueError, match=r'expected an engine that was created after connect\("remote"'):
        engine({REFERENCE: IdsReference(0, "a", 2)})


def test_a_feature_that_a_batch_lacks_has_no_ids():
    tables = {"x": kv.Table(2, missing="empty"), "y": kv.Table(2, combiner="sequence", missing="empty")}
    engine = kv.EmbeddingEngine(tables)
    made = engine({"label": torch.zeros(3)})
    assert made["x"].tolist() == [[0, 0]] * 3
    assert made["y"].values.shape == (3, 0, 2)
    assert engine({"y": torch.tensor([[1], [2]])})["x"].shape == (2, 2)
    assert engine.sizes() == {"x": 0, "y": 2}
    with pytest.raises(KeyError, match="Feature 'x' of table 'x' is not in the batch"):
        engine({})
    with pytest.raises(ValueError, match="Table expects missing 'error' or 'empty', got 'none'"):
        kv.Table(2, missing="none")


PADDED = {
    **{name: kv.Table(3, combiner=name) for name in ("sum", "mean", "mean_by_count", "sqrtn", "ragged")},
    "stack": kv.Table(3, hash_stack=HashStack(2, 10)),
    **{f"{name}-4": kv.Table(3, combiner=name, length=4) for name in ("sequence", "tile", "index")},
    **{name: kv.Table(3, combiner=name) for name in ("sequence", "index")},
}


def tensors_of(output):
    """All numbers of an output."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, kv.Ragged):
        return [output.values, output.offsets]
    return (
        tensors_of(output.to_sequence()) if hasattr(output, "to_sequence") else [output.values, output.mask]
    )


@pytest.mark.parametrize("name", PADDED)
@settings(max_examples=8)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, -1, 2**40]), max_size=4), min_size=1, max_size=4),
    st.sampled_from([0, 2, -1]),
    st.booleans(),
)
def test_padded_ids_are_as_if_they_were_not_in_the_batch(name, lists, padding, weighted):
    declared = {"x": dataclasses.replace(PADDED[name], padding_idx=padding)}
    engine, plain = (kv.EmbeddingEngine(tables, seed=1) for tables in (declared, {"x": PADDED[name]}))
    sparse, expected = (kv.optim.Adagrad(each, lr=0.1) for each in (engine, plain))
    weights = [[1.0 + n for n in range(len(row))] for row in lists] if weighted else None
    kept = [[n for n, key in enumerate(row) if key != padding] for row in lists]
    without = [[row[n] for n in indices] for row, indices in zip(lists, kept, strict=True)]
    their = None if weights is None else [[1.0 + n for n in indices] for indices in kept]
    for _ in range(2):
        made = tensors_of(engine({"x": kv.Ragged.from_lists(lists, weights=weights)})["x"])
        wanted = tensors_of(plain({"x": kv.Ragged.from_lists(without, weights=their)})["x"])
        assert all(map(torch.equal, made, wanted))
        for output, optimizer in ((made[0], sparse), (wanted[0], expected)):
            output.square().sum().backward()
            optimizer.step()
    assert _rows(engine, "x") == _rows(plain, "x")


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_padding_is_that_of_torch(combiner):
    ids = torch.tensor([[3, 0, 5], [0, 0, 0], [5, 5, 0]])
    engine = kv.EmbeddingEngine({"x": kv.Table(4, combiner=combiner, padding_idx=0)})
    sparse = kv.optim.SGD(engine, lr=0.5)
    engine({"x": ids})
    bag = torch.nn.EmbeddingBag(6, 4, mode=combiner, padding_idx=0)
    keys = engine.table("x").keys()
    assert sorted(keys.tolist()) == [3, 5]
    with torch.no_grad():
        bag.weight[keys] = engine.table("x").vectors(keys)
    for _ in range(3):
        ours, theirs = engine({"x": ids})["x"], bag(ids)
        torch.testing.assert_close(ours, theirs)
        bag.weight.grad = None
        for output in (ours, theirs):
            output.square().sum().backward()
        sparse.step()
        with torch.no_grad():
            bag.weight -= 0.5 * bag.weight.grad


def test_a_matrix_keeps_its_width_and_a_feature_of_one_id_may_be_padded():
    tables = {"x": kv.Table(2, combiner="sequence", padding_idx=0), "y": kv.Table(2, name="x", padding_idx=9)}
    engine = kv.EmbeddingEngine(tables)
    out = engine({"x": torch.tensor([[1, 0, 0], [2, 3, 0]]), "y": torch.tensor([0, 9])})
    assert out["x"].mask.tolist() == [[True, False, False], [True, True, False]]
    assert out["y"][0].any()
    assert not out["y"][1].any()
    top = kv.EmbeddingEngine({"x": kv.Table(2, padding_idx=2**64 - 1)})
    assert not top({"x": torch.tensor([-1])})["x"].any()
    assert top.sizes() == {"x": 0}
    for wrong in (0.5, 2**64, "0"):
        with pytest.raises((TypeError, ValueError), match="padding_idx"):
            kv.Table(2, padding_idx=wrong)


def test_an_id_that_fills_the_ends_of_rows_is_a_hint_once(caplog):
    lengths = torch.arange(32) % 4
    ids = torch.where(torch.arange(6) < lengths.unsqueeze(1), torch.arange(1, 193).reshape(32, 6), 0)
    same = kv.Ragged(ids.reshape(-1), torch.arange(0, 193, 6))
    tables = {name: kv.Table(2, padding_idx=0 if name == "p" else None) for name in "xyzp"}
    engine = kv.EmbeddingEngine(tables)
    for _ in range(2):
        engine({"x": ids, "y": same, "z": torch.stack([lengths + 1, lengths * 0], 1), "p": ids})
    assert [line.split("'")[1] for line in caplog.messages] == ["x", "y"]  # z has pairs
    assert "padding_idx=0" in caplog.messages[0]
