"""`state_dict()` of a model with tables: it says that it has no rows, or it has them."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import karvan as kv


class Model(nn.Module):
    def __init__(self, dim=4, **options):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"user": kv.Table(dim, **options), "item": kv.Table(2)})
        self.net = nn.Linear(dim + 2, 1)

    def forward(self, batch):
        out = self.embeddings(batch)
        return self.net(torch.cat([out["user"], out["item"]], 1)).squeeze(1)


def train(model, ids, sparse=None):
    sparse = sparse or kv.optim.Adagrad(model, lr=0.1)
    for user, item in ids:
        model({"user": torch.tensor([user]), "item": torch.tensor([item])}).sum().backward()
        sparse.step()
    return sparse


def through_a_file(state):
    """What `torch.save` and `torch.load` make of it, without any code of ours."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def rows(model):
    return {
        (table.name, part): array.tolist()
        for table in model.embeddings.tables()
        for part, array in table.snapshot()._asdict().items()
    }


def test_a_state_without_rows_is_refused_by_a_model_without_rows():
    model = Model()
    train(model, [(1, 2), (3, 2)])
    state, fresh = through_a_file(model.state_dict()), Model()
    with pytest.raises(
        ValueError, match=r"user \(2 rows\), item \(1 rows\).*kv\.Checkpoints.*rows=True"
    ) as told:
        fresh.load_state_dict(state)
    assert "strict=False" in str(told.value)
    # as it says
    dense = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    fresh.load_state_dict(dense, strict=False)
    assert torch.equal(fresh.net.weight, model.net.weight)


def test_only_tables_that_had_rows_are_missed():
    model, fresh = Model(), Model()
    model.embeddings.table("item").load(rows_of_item())
    fresh.embeddings.table("user")
    with pytest.raises(ValueError, match=r"Tables: item \(1 rows\)\."):
        fresh.load_state_dict(model.state_dict())
    fresh.embeddings.table("item").load(rows_of_item())
    fresh.load_state_dict(model.state_dict())


def rows_of_item():
    other = Model()
    other({"user": torch.tensor([1]), "item": torch.tensor([9])})
    return other.embeddings.table("item").snapshot()


def test_a_model_that_has_its_rows_takes_its_state_back():
    model = Model()
    train(model, [(1, 2), (3, 2)])
    state = through_a_file(model.state_dict())
    weight, before, step = model.net.weight.detach().clone(), rows(model), model.embeddings.step
    with torch.no_grad():
        model.net.weight.zero_()
    model.embeddings.step = 0
    model.load_state_dict(state)
    assert torch.equal(model.net.weight, weight)
    assert (rows(model), model.embeddings.step) == (before, step)


@pytest.mark.parametrize("other", [[(1, 2)], [(1, 2), (3, 2)], [(each, 2) for each in range(100)]])
def test_a_state_without_rows_is_refused_by_a_model_with_rows_of_another(other):
    model, fresh = Model(), Model()
    train(model, [(1, 2), (3, 2)])
    train(fresh, other)
    before = rows(fresh)
    with pytest.raises(
        ValueError, match=r"rows come from another model.*Tables: user \(2 rows\), item \(1 rows\)"
    ):
        fresh.load_state_dict(through_a_file(model.state_dict()))
    assert rows(fresh) == before


def test_a_state_of_an_earlier_step_leaves_rows_and_step_as_they_are_and_says_so(caplog):
    model = Model()
    sparse = train(model, [(1, 2), (3, 2)])
    best = through_a_file(model.state_dict())
    model.load_state_dict(best)
    assert not caplog.records
    train(model, [(1, 2)] * 3, sparse)
    before = rows(model)
    model.load_state_dict(best)
    (record,) = caplog.records
    assert "dense parameters of step 2, but the rows are still from step 5" in record.getMessage()
    assert "Tables: user, item." in record.getMessage()
    assert (rows(model), model.embeddings.step) == (before, 5)


def test_the_state_of_before_training_leaves_rows_and_step_as_they_are_and_says_so(caplog):
    model = Model()
    first = through_a_file(model.state_dict())
    train(model, [(1, 2), (3, 2)])
    model.load_state_dict(first)
    assert "dense parameters of step 0, but the rows are still from step" in caplog.text
    assert model.embeddings.step == 2


def test_rows_of_a_snapshot_belong_to_the_next_state_and_to_no_earlier_one(caplog):
    model, second = Model(), Model()
    train(model, [(1, 2)])
    sparse = kv.optim.Adagrad(second, lr=0.1)
    for table in second.embeddings.tables():
        table.load(model.embeddings.table(table.name).snapshot())
    second.load_state_dict(model.state_dict())
    assert second.embeddings.step == 1
    for table in second.embeddings.tables():
        table.load(model.embeddings.table(table.name).snapshot())
    own = second.state_dict()
    train(second, [(3, 4)], sparse)
    assert not caplog.records
    second.load_state_dict(own)
    assert "dense parameters of step 1, but the rows are still from step 2" in caplog.text


def test_models_that_began_with_the_same_state_are_different_once_they_are_trained():
    model, second = Model(), Model()
    second.load_state_dict(model.state_dict())
    train(model, [(1, 2)])
    train(second, [(3, 4)])
    with pytest.raises(ValueError, match="rows come from another model"):
        second.load_state_dict(model.state_dict())


def test_a_state_with_rows_or_a_checkpoint_goes_back_to_an_earlier_step_without_a_word(tmp_path, caplog):
    model = Model()
    sparse = train(model, [(1, 2), (3, 2)])
    best = model.state_dict() | model.embeddings.state_dict(prefix="embeddings.", rows=True)
    kv.checkpoint.save(tmp_path / "one", {"model": model.state_dict()}, model)
    before = rows(model)
    for restore in (lambda: best, lambda: kv.checkpoint.find(tmp_path / "one").load(model)["model"]):
        train(model, [(5, 6)], sparse)
        state = restore()
        for _ in range(2):
            model.load_state_dict(state)
        assert (rows(model), model.embeddings.step) == (before, 2)
    assert not caplog.records


def test_a_model_of_a_checkpoint_is_the_same_content_as_the_one_that_was_saved(tmp_path, caplog):
    model, second = Model(), Model()
    train(model, [(1, 2), (3, 2)])
    kv.checkpoint.save(tmp_path / "one", {"model": model.state_dict()}, model)
    second.load_state_dict(kv.checkpoint.find(tmp_path / "one").load(second)["model"])
    second.load_state_dict(through_a_file(model.state_dict()))
    assert not caplog.records
    third = Model()
    train(third, [(7, 7)])
    with pytest.raises(ValueError, match="rows come from another model"):
        second.load_state_dict(third.state_dict())


def test_a_model_that_has_learned_nothing_yet_loads_anywhere():
    first, second = Model(), Model()
    second.load_state_dict(through_a_file(first.state_dict()))
    assert second.embeddings.step == 0
    assert not any(second.embeddings.sizes().values())
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_checkpoints_are_loaded_as_before(tmp_path):
    model = Model()
    train(model, [(1, 2), (3, 4)])
    kv.checkpoint.save(tmp_path / "one", {"model": model.state_dict()}, model)
    fresh = Model()
    fresh.load_state_dict(kv.checkpoint.find(tmp_path / "one").load(fresh)["model"])
    assert rows(fresh)["user", "vectors"] == rows(model)["user", "vectors"]


ids = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5))


@given(
    first=st.lists(ids, min_size=1, max_size=6),
    other=st.lists(ids, max_size=4),
    later=st.lists(ids, max_size=4),
)
def test_rows_travel_and_training_continues_as_if_nothing_had_happened(first, other, later):
    model, second = (
        Model(admit=kv.admission.MinCount(2, slots=64)),
        Model(admit=kv.admission.MinCount(2, slots=64)),
    )
    sparse, its = train(model, first), train(second, other)  # what was there is replaced
    state = model.state_dict() | model.embeddings.state_dict(prefix="embeddings.", rows=True)
    state, steps = through_a_file(state), through_a_file(sparse.state_dict())
    second.load_state_dict(state)
    its.load_state_dict(steps)
    assert rows(second) == rows(model)
    train(model, later, sparse)
    train(second, later, its)
    assert rows(second) == rows(model)
    assert second.embeddings.step == model.embeddings.step


def test_rows_travel_into_an_engine_without_an_optimizer_and_back():
    model, bare = Model(), Model()
    train(model, [(1, 2), (3, 4)])
    bare.embeddings.load_state_dict(model.embeddings.state_dict(rows=True))
    assert rows(bare)["user", "vectors"] == rows(model)["user", "vectors"]
    fresh = Model()
    kv.optim.Adagrad(fresh, lr=0.1, initial_accumulator_value=0.5)
    fresh.embeddings.load_state_dict(bare.embeddings.state_dict(rows=True))
    assert rows(fresh)["user", "state"] == [[0.5] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_two_bytes_travel(dtype):
    model, fresh = Model(dtype=dtype), Model(dtype=dtype)
    train(model, [(1, 2), (3, 4)])
    kv.optim.Adagrad(fresh, lr=0.1)
    fresh.embeddings.load_state_dict(through_a_file(model.embeddings.state_dict(rows=True)))
    assert rows(fresh) == rows(model)


def test_rows_that_do_not_fit_are_refused_and_change_nothing():
    model = Model()
    train(model, [(1, 2)])
    state = model.embeddings.state_dict(rows=True)
    wide, other = Model(dim=8), Model()
    with pytest.raises(ValueError, match="Table 'user' has dim 8, but the state_dict has 4"):
        wide.embeddings.load_state_dict(state)
    train(other, [(5, 6)], kv.optim.Adam(other, lr=0.1))
    before = rows(other)
    with pytest.raises(
        ValueError, match="8 floats of Adam state for each row, but the state_dict has 4 of Adag"
    ):
        other.embeddings.load_state_dict(state)
    assert rows(other) == before


def test_tables_that_are_too_large_for_a_state_are_refused(monkeypatch):
    monkeypatch.setattr("karvan.embedding.portable.MOST_BYTES", 100)
    model = Model()
    train(model, [(1, 2)])
    with pytest.raises(ValueError, match=r"at most .* GiB, got .* GiB: save them with kv\.Checkpoints"):
        model.embeddings.state_dict(rows=True)
