"""What all models promise: shapes, gradients everywhere, the same bits again, settings that work."""

import copy

import pytest
import torch

import karvan as kv
from karvan import models

NUMBERS, IDS = ["x", "y"], ["a", "b", "c"]

MAKERS = {
    "DLRM": lambda **o: models.DLRM(NUMBERS, IDS, 8, bottom=(16,), top=(16, 8), **o),
    "DLRM without numbers": lambda **o: models.DLRM([], IDS, 8, top=(16,), **o),
    "DeepFM": lambda **o: models.DeepFM(NUMBERS, IDS, 8, hidden=(16,), **o),
    "DeepFM without numbers": lambda **o: models.DeepFM([], IDS, 8, hidden=(16,), **o),
    "DCN": lambda **o: models.DCN(NUMBERS, IDS, 8, crosses=2, hidden=(16,), **o),
    "DCN low rank": lambda **o: models.DCN(NUMBERS, IDS, 8, rank=3, hidden=(16,), **o),
    "DCN parallel": lambda **o: models.DCN(NUMBERS, IDS, 8, structure="parallel", hidden=(16,), **o),
    "WideDeep": lambda **o: models.WideDeep(NUMBERS, IDS, ["a", "a_x_b"], 8, hidden=(16,), **o),
    "DIN": lambda **o: models.DIN(NUMBERS, IDS, {"as": "a"}, 8, hidden=(16,), attention=(8,), length=4, **o),
    "MMoE": lambda **o: models.MMoE(NUMBERS, IDS, ["ctr", "cvr"], 8, 3, (16, 8), (16,), **o),
}


def _batch(rows=12, seed=0):
    random = torch.Generator().manual_seed(seed)
    entries = {name: torch.randn(rows, generator=random) for name in NUMBERS}
    entries |= {name: torch.randint(5, (rows,), generator=random) for name in [*IDS, "a_x_b"]}
    lengths = torch.arange(rows) % 6  # the first history is empty
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    entries["as"] = kv.Ragged(torch.randint(5, (int(offsets[-1]),), generator=random), offsets)
    return kv.Batch(entries)


def _flat(output):
    return torch.stack(list(output.values())) if isinstance(output, dict) else output


def _engines(model):
    return [m for m in model.modules() if isinstance(m, kv.EmbeddingEngine)]


def _step(model, batch):
    sparse = kv.optim.SGD(model, lr=0.5)
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    _flat(model(batch)).square().sum().backward()
    sparse.step()
    dense.step()


@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_becomes_a_logit_for_each_row(name):
    model = MAKERS[name]()
    assert isinstance(model.embeddings, kv.EmbeddingEngine)
    for rows in (12, 1):
        output = model(_batch(rows))
        for logits in output.values() if isinstance(output, dict) else [output]:
            assert logits.shape == (rows,)
            assert logits.isfinite().all()
    assert not isinstance(output, dict) or list(output) == ["ctr", "cvr"]


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_reach_every_parameter_and_every_table(name):
    torch.manual_seed(1)
    model, batch = MAKERS[name](), _batch(60)
    model(batch)
    before = {t: t.snapshot().vectors.copy() for e in _engines(model) for t in e.tables()}
    _step(model, batch)
    assert [n for n, p in model.named_parameters() if p.numel() and not p.grad.any()] == []
    for table, vectors in before.items():
        assert (table.snapshot().vectors != vectors).any(), table.name


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_seed_gives_the_same_bits_on_any_number_of_threads(name):
    results = []
    for threads in (1, 3):
        kv.set_num_threads(threads)
        torch.manual_seed(3)
        model = MAKERS[name](seed=5)
        _step(model, _batch(200))
        results.append(_flat(model(_batch(200, seed=1))).detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("name", MAKERS)
def test_a_template_or_tables_by_name_say_what_rows_are_like(name):
    like = kv.Table(8, init=kv.init.Constant(0.5), admit=kv.admission.ReadOnly(), combiner="sum")
    model = MAKERS[name](table=like)
    model(_batch())
    assert all(table.rows == 0 for table in model.embeddings.tables())
    one = MAKERS[name](table={"b": like})
    one(_batch())
    assert {t.name: t.rows > 0 for t in one.embeddings.tables()} == {"a": True, "b": False, "c": True}
    with pytest.raises(ValueError, match="table of 'a' has dim 4, but the model has dim 8"):
        MAKERS[name](table=kv.Table(4))
    with pytest.raises(ValueError, match="a table for z, but ids are a, b, c"):
        MAKERS[name](table={"z": like})
    with pytest.raises(ValueError, match=r"pool its ids by sum, .*, sqrtn, but has combiner 'sequence'"):
        MAKERS[name](table=kv.Table(8, combiner="sequence"))
    with pytest.raises(ValueError, match="but has combiner 'index'"):
        MAKERS[name](table=kv.Table(8, combiner="index"))


@pytest.mark.parametrize("name", MAKERS)
def test_autocast_trains(name):
    model = MAKERS[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = _flat(model(_batch()))
    output.float().sum().backward()
    assert output.isfinite().all()


@pytest.mark.parametrize("name", MAKERS)
def test_dense_weights_are_saved_and_loaded(name):
    first, second = MAKERS[name](), MAKERS[name]()
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    assert torch.equal(_flat(first(_batch())), _flat(second(_batch())))


def test_the_dlrm_of_the_benchmark():
    numbers, ids = [f"I{i}" for i in range(13)], [f"C{i}" for i in range(26)]
    model = models.DLRM(numbers, ids, dim=16, bottom=(512, 256), top=(512, 256))
    sizes = [
        [m.out_features for m in net if isinstance(m, torch.nn.Linear)] for net in (model.bottom, model.top)
    ]
    assert sizes == [[512, 256, 16], [512, 256, 1]]
    assert model.top[0].in_features == 16 + 27 * 26 // 2


def test_dlrm_is_its_formula():
    model, batch = MAKERS["DLRM"](), _batch()
    embedded = model.embeddings(batch)
    bottom = model.bottom(torch.stack([batch["x"], batch["y"]], 1))
    stacked = torch.stack([bottom, *(embedded[name] for name in IDS)], 1)
    row, column = torch.tril_indices(4, 4, -1)
    pairs = (stacked @ stacked.transpose(1, 2))[:, row, column]
    expected = model.top(torch.cat([bottom, pairs], 1)).squeeze(1)
    torch.testing.assert_close(model(batch), expected)


def test_deepfm_counts_every_pair_once():
    model, batch = MAKERS["DeepFM"](), _batch()
    torch.nn.init.normal_(model.weights)
    model.net = torch.nn.Sequential(model.net, torch.nn.Threshold(float("inf"), 0.0))  # no deep part
    rows = [model.embeddings(batch)[name] for name in IDS]
    fields = [row[:, 1:] for row in rows]
    fields += [batch[name].unsqueeze(1) * model.factors[i] for i, name in enumerate(NUMBERS)]
    expected = sum(row[:, 0] for row in rows) + model.bias
    expected = expected + sum(w * batch[name] for w, name in zip(model.weights, NUMBERS, strict=True))
    for i in range(5):
        for j in range(i):
            expected = expected + (fields[i] * fields[j]).sum(1)
    torch.testing.assert_close(model(batch), expected)


def test_din_gives_empty_histories_nothing_and_ignores_what_is_padding():
    model = MAKERS["DIN"]().eval()
    batch = dict(_batch())
    model.train()(batch)
    model.eval()
    empty = {**batch, "as": kv.Ragged.from_lists([[]] * 12)}
    assert torch.equal(model(empty)[:1], model(batch)[:1])
    assert not torch.equal(model(empty)[1:], model(batch)[1:])
    one = {
        name: kv.Ragged.from_lists([entry.to_lists()[1]]) if name == "as" else entry[1:2]
        for name, entry in batch.items()
    }
    torch.testing.assert_close(model(one), model(batch)[1:2])  # alone there is no padding


def test_wide_weights_have_an_engine_and_an_optimizer_of_their_own():
    model = MAKERS["WideDeep"](wide_table=kv.Table(1, init=kv.init.Constant(2.0)))
    assert [t.name for t in model.wide.tables()] == ["wide.a", "wide.a_x_b"]
    deep, wide = kv.optim.Adagrad(model.embeddings), kv.optim.FTRL(model.wide, l1=1e6)
    model(_batch()).sum().backward()
    deep.step()
    wide.step()
    assert not model.wide.table("wide.a").snapshot().vectors.any()  # such an l1 leaves nothing
    assert model.embeddings.table("a").snapshot().vectors.all()


def test_numbers_may_be_wide_and_wrong_ones_are_named():
    model = models.DLRM({"x": 1, "v": 3}, ["a", "b"], 4)
    batch = {**_batch(), "v": torch.randn(12, 3)}
    assert model(batch).shape == (12,)
    with pytest.raises(KeyError, match="Number 'v' is not in the batch, which has: x, y"):
        model(_batch())
    with pytest.raises(ValueError, match=r"Number 'v' must be a tensor \(B, 3\), but is \(12, 2\)"):
        model({**batch, "v": torch.randn(12, 2)})
    with pytest.raises(ValueError, match="list of different numbers, got 'price'"):
        models.DLRM("price", ["a"])
    with pytest.raises(ValueError, match="list of different ids"):
        models.DLRM(["x"], ["a", "a"])
    with pytest.raises(ValueError, match="numbers or at least two ids"):
        models.DLRM([], ["a"])
    with pytest.raises(ValueError, match="'stacked' or 'parallel', got 'wide'"):
        models.DCN(["x"], ["a"], structure="wide")
    with pytest.raises(ValueError, match="got 'as' of 'z', and ids a, b, c"):
        models.DIN(NUMBERS, IDS, {"as": "z"})
    with pytest.raises(ValueError, match="expects tasks"):
        models.MMoE(NUMBERS, IDS, [])


@pytest.mark.parametrize("large", [1_770_000_000_000_000, 2e5])
def test_a_number_too_large_to_learn_from_is_a_warning_once_that_names_it(caplog, large):
    model = kv.models.DeepFM(["price", "time"], ["user"], dim=4)
    batch = {
        "price": torch.tensor([9.5, torch.nan]),
        "time": torch.tensor([0, large]),
        "user": torch.tensor([1, 2]),
    }
    model.eval()(batch)
    assert not caplog.records
    model.train()
    for _ in range(2):
        model(batch)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"Number 'time' has values up to {large:.2g} in the first batch")
    assert "kv.Feature('time').normalise()" in said


def test_scaled_numbers_give_no_warning(caplog):
    scaled = kv.FeatureEngine([kv.Feature("time").log1p()])
    batch = {"time": torch.tensor([0, 1_770_000_000_000_000]), "user": torch.tensor([1, 2])}
    kv.models.DeepFM(["time"], ["user"], dim=4)(scaled(batch))
    assert not caplog.records


@pytest.mark.parametrize("missing", ["b", None])
def test_text_among_the_numbers_is_told_how_to_become_ids_or_numbers(missing):
    net = kv.models.DeepFM(["dept"], ["user"], dim=4)
    (batch,) = kv.data.read({"dept": ["a", missing], "user": [1, 2]}, 2)
    with pytest.raises(
        ValueError, match=r"Number 'dept' is text .*hash\(\"farm\"\).*to_numbers\(default=0\)"
    ):
        net(batch)
