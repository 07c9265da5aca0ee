"""Features of engines that are not one list of ids for each sample of a table that they train."""

import pytest
import torch
from feature_helpers import nested
from hypothesis import given, settings
from hypothesis import strategies as st

import karvan as kv
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
    with pytest.raises(ValueError, match=r'expects an engine that was created after connect\("remote"'):
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
