"""Bad input: the message names table and feature, says expected and received, and nothing has changed."""

import re

import pytest
import reference as ref
import torch

import karvan as kv
from karvan.embedding import HashStack

BAD = (ValueError, TypeError)


@pytest.fixture
def engine():
    """Feature user has its own table; history shares the rows of item, and weighs."""
    engine = kv.EmbeddingEngine(
        {
            "user": kv.Table(4),
            "item": kv.Table(4, name="goods"),
            "history": kv.Table(4, name="goods", combiner="mean"),
        }
    )
    engine(good())
    return engine


def good(**changes):
    batch = {
        "user": torch.tensor([1, 2]),
        "item": torch.tensor([3, 4]),
        "history": kv.Ragged.from_lists([[5], [6, 7]]),
    }
    return batch | changes


def ragged(values, offsets):
    return kv.Ragged(torch.as_tensor(values), torch.tensor(offsets))


def tampered(**parts):
    """A Ragged whose parts were replaced after its constructor had checked them."""
    result = kv.Ragged.from_lists([[5], [6, 7]], weights=[[1.0], [1.0, 1.0]])
    for name, part in parts.items():
        setattr(result, name, part)
    return result


def everything(engine):
    seen = {"step": torch.tensor(engine.step)}
    for name in ("user", "goods"):
        handle = engine.table(name)
        seen |= {f"{name} {part}": t for part, t in ref.sort_rows(handle.snapshot()).items()}
        seen[f"{name} stats"] = torch.tensor([handle.stats()[k] for k in sorted(handle.stats())])
    return seen


NEW = torch.tensor([100, 200])  # keys that a half-done lookup would have inserted


@pytest.mark.parametrize(
    ("history", "says"),
    [
        (torch.tensor([1.0, 2.0]), ["int64", "float32"]),
        (kv.Ragged(torch.tensor([1.0, 2.0]), torch.tensor([0, 1, 2])), ["int64", "float32"]),
        (ragged([5, 6, 7], [0, 4, 3]), ["offsets"]),
        (ragged([5, 6, 7], [0, -1, 3]), ["offsets"]),
        (ragged([5, 6, 7], [1, 2, 3]), ["offsets", "0", "1"]),
        (ragged([5, 6, 7], [0, 1, 2]), ["offsets", "3", "2"]),
        (ragged([5, 6, 7], [0, 1, 2**62]), ["offsets", "3"]),
        (tampered(offsets=torch.tensor([0, 1, 3], dtype=torch.int32)), ["offsets", "int64", "int32"]),
        (tampered(offsets=torch.tensor([[0, 1, 3]])), []),
        (tampered(weights=torch.ones(2)), ["weights", "3", "2"]),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ["cpu", "meta"]),
        (torch.zeros(2, 2, 2, 2, dtype=torch.int64), ["(2, 2, 2, 2)"]),
        ([[5], [6, 7]], ["list"]),
    ],
    ids=lambda value: (
        "-".join(value) if isinstance(value, list) and all(isinstance(x, str) for x in value) else "x"
    ),
)
def test_bad_ids_name_the_feature_and_change_nothing(engine, history, says):
    before = everything(engine)
    for training in (True, False):
        engine.train(training)
        with pytest.raises(BAD) as error:
            engine(good(user=NEW, item=NEW, history=history))
        for word in ["history", "goods", *says]:
            assert word in str(error.value).replace("CPU", "cpu")
    after = everything(engine)
    assert all(torch.equal(after[what], tensor) for what, tensor in before.items())


def test_unequal_samples_name_both_features_and_change_nothing(engine):
    before = everything(engine)
    with pytest.raises(ValueError, match="samples") as error:
        engine(good(user=NEW, item=NEW, history=kv.Ragged.from_lists([[1], [], [2]])))
    assert all(word in str(error.value) for word in ("user", "2", "history", "3"))
    assert all(torch.equal(everything(engine)[what], tensor) for what, tensor in before.items())


def test_an_absent_feature_is_named_and_changes_nothing(engine):
    before = everything(engine)
    batch = good(user=NEW)
    del batch["history"]
    with pytest.raises(KeyError, match="history"):
        engine(batch)
    assert all(torch.equal(everything(engine)[what], tensor) for what, tensor in before.items())


def test_an_engine_goes_on_after_an_error(engine):
    with pytest.raises(BAD):
        engine(good(history=ragged([5, 6, 7], [0, 4, 3])))
    out = engine(good())
    out["history"].sum().backward()
    kv.optim.SGD(engine, lr=1.0).step()
    assert engine.table("goods").stats()["dropped_gradients"] == 0


def test_int32_offsets_and_short_weights_are_refused_by_ragged():
    with pytest.raises(TypeError, match=r"offsets.*int64.*int32"):
        kv.Ragged(torch.tensor([1]), torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"weights.*\(2,\).*\(1,\)"):
        kv.Ragged(torch.tensor([1, 2]), weights=torch.ones(1))


def test_two_dims_for_one_table():
    with pytest.raises(ValueError, match=r"item.*16.*history.*32"):
        kv.EmbeddingEngine({"item": kv.Table(16), "history": kv.Table(32, name="item")})


@pytest.mark.parametrize(
    "other",
    [
        {"init": kv.init.Constant(1.0)},
        {"init": kv.init.Uniform(-0.5, 0.5)},
        {"dtype": torch.bfloat16},
        {"admit": kv.admission.MinCount(2)},
        {"evict": kv.eviction.LRU(5)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_features_of_one_table_must_agree(other):
    with pytest.raises(ValueError, match=r"item.*history"):
        kv.EmbeddingEngine({"item": kv.Table(16), "history": kv.Table(16, name="item", **other)})


def test_features_of_one_table_may_pool_differently():
    engine = kv.EmbeddingEngine(
        {
            "item": kv.Table(16, init=kv.init.Normal(0.0, 0.1)),
            "history": kv.Table(16, name="item", init=kv.init.Normal(0.0, 0.1), combiner="tile", length=3),
        }
    )
    out = engine({"item": torch.tensor([7, 8]), "history": kv.Ragged.from_lists([[8, 7], [7]])})
    seven, eight = engine.table("item").vectors([7, 8])
    assert torch.equal(out["item"], torch.stack([seven, eight]))
    nothing = torch.zeros(16)
    rows = [torch.cat([eight, seven, nothing]), torch.cat([seven, nothing, nothing])]
    assert torch.equal(out["history"], torch.stack(rows))
    assert engine.table("item").rows == 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kv.Table(4, evict=kv.eviction.LRU(-1)), r"capacity.*-1"),
        (lambda: kv.Table(4, evict=kv.eviction.LRU(0)), r"capacity.*0"),
        (lambda: kv.Table(4, evict=kv.eviction.LFU(0)), r"capacity.*0"),
        (lambda: kv.Table(4, evict=kv.eviction.Age(-1)), r"steps.*-1"),
        (lambda: kv.Table(4, evict=kv.eviction.Age(0, every=0)), r"every.*0"),
        (lambda: kv.Table(4, evict=kv.eviction.TTL(-1.0)), r"seconds.*-1"),
        (lambda: kv.Table(4, admit=kv.admission.Probability(1.5)), r"1\.5"),
        (lambda: kv.Table(4, admit=kv.admission.MinCount(0)), r"0"),
        (lambda: kv.Table(4, hash_stack=HashStack(0, 10)), r"rounds.*0"),
        (lambda: kv.Table(4, hash_stack=HashStack(2, 0)), r"size.*0"),
        (lambda: kv.Table(0), r"dim.*0"),
        (lambda: kv.Table(-4), r"dim.*-4"),
        (lambda: kv.Table(4, combiner="max"), r"sum.*max"),
        (lambda: kv.Table(4, combiner="tile"), r"length"),
        (lambda: kv.Table(4, combiner="tile", length=0), r"length.*0"),
        (lambda: kv.Table(4, combiner="index", length=0), r"length.*0"),
        (lambda: kv.Table(4, length=2), r"length with 'sequence', 'tile' and 'index', not with 'sum'"),
        (lambda: kv.Table(4, dtype=torch.int64), r"int64"),
    ],
)
def test_bad_configuration_is_refused_with_the_received_value(make, says):
    with pytest.raises(BAD, match=says):
        kv.EmbeddingEngine({"user": make()})


def test_an_unknown_table_is_named(engine):
    with pytest.raises(KeyError, match="nowhere"):
        engine.table("nowhere")


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        ("SGD", {"lr": -0.1}),
        ("Adagrad", {"lr": 0.1, "accumulate": "middle"}),
        ("Adam", {"betas": (1.0, 0.9)}),
        ("FTRL", {"lr": 0.0}),
        ("SGD", {"lr": 0.1, "clip_norm": -1.0}),
        ("SGD", {"lr": 0.1, "weight_bound": -1.0}),
    ],
)
def test_optimizers_refuse_bad_arguments(engine, cls, options):
    with pytest.raises(BAD):
        getattr(kv.optim, cls)(engine, **options)


@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (
            "Adagrad",
            {"accumulate": "last"},
            r"accumulate='last'.*initial_accumulator_value.*at least 1e-06, got 0:.*'first'",
        ),
        ("Adagrad", {"accumulate": "last", "row_wise": True}, "initial_accumulator_value=0.1"),
        ("Adagrad", {"accumulate": "last", "initial_accumulator_value": 1e-30}, "at least 1e-06, got 1e-30"),
        ("Adagrad", {"eps": 0.0}, "divides a gradient of 0 by 0"),
        ("Adam", {"eps": 0.0}, "above 0, got 0"),
        ("AdamW", {"eps": 0.0}, "above 0, got 0"),
        ("FTRL", {"beta": 0.0}, "divides a gradient of 0 by 0"),
        ("FTRLTF", {"initial_accumulator_value": 0.0}, "divides a gradient of 0 by 0"),
        ("SGD", {"nesterov": True}, "nesterov=True expects a momentum above 0, got 0"),
    ],
)
def test_settings_that_divide_by_almost_nothing_are_refused(engine, cls, options, says):
    with pytest.raises(ValueError, match=says):
        getattr(kv.optim, cls)(**options)
    with pytest.raises(ValueError, match=says):  # said for one group of tables only
        getattr(kv.optim, cls)([{"params": engine.table("goods"), **options}])


def test_ftrl_refuses_a_learning_rate_that_a_scheduler_brought_to_zero(engine):
    optimizer = kv.optim.FTRL(engine, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = everything(engine)["goods vectors"]
    sum(each.sum() for each in engine(good()).values()).backward()
    with pytest.raises(ValueError, match=r"divides by lr, but lr is 0\.0 now"):
        optimizer.step()
    assert torch.equal(everything(engine)["goods vectors"], before)


def test_load_refuses_rows_of_another_width(engine):
    rows = engine.table("goods").snapshot()
    other = kv.EmbeddingEngine({"user": kv.Table(8)})
    with pytest.raises(ValueError, match=r"user.*8.*4"):
        other.table("user").load(rows)
    assert other.table("user").rows == 0


def test_evict_keys_refuses_float_keys(engine):
    with pytest.raises(BAD, match="goods"):
        engine.table("goods").evict_keys(torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("texts", "step", "config"),
    [
        (
            ["a", "a|b"],
            'If values such as \'a|b\' are lists, split them first: .*split("|").hash("farm")',
            "|",
        ),
        (
            ["12 7", "30"],
            "If values such as '12 7' are lists, split them first: .*split(\" \").to_ids()",
            " ",
        ),
        (["a; b", None], "If values such as 'a; b' are lists, split them first: .*split(\";\").hash", ";"),
        (["a", "b"], "This looks like text: turn it into ids by kv.Feature('tags').hash", None),
    ],
)
def test_text_that_may_be_lists_is_split_before_it_is_hashed(texts, step, config):
    engine = kv.EmbeddingEngine({"tags": kv.Table(4, combiner="mean")})
    (batch,) = kv.data.read({"tags": texts}, len(texts))
    with pytest.raises(TypeError) as error:
        engine(batch)
    assert re.search(".*".join(map(re.escape, step.split(".*"))), str(error.value))
    assert ("{split: " in str(error.value)) is (config is not None)
    assert config is None or f'[{{split: "{config}"}}, ' in str(error.value)
