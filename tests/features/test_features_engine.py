"""The engine: features in one call, results of others, what passes through."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from feature_helpers import nested, ragged_text, run, same
from forked_programs import run_forked
from many_features import alone, many_features
from torch.utils._python_dispatch import TorchDispatchMode

from karvan import _native
from karvan.embedding import EmbeddingEngine, Table
from karvan.features import ElementOp, Feature, FeatureEngine
from karvan.ragged import Batch, Ragged, values_of


def batch_of(size=4):
    return {
        "price": torch.linspace(0, 9, size),
        "age": torch.arange(size) * 11.0,
        "user": torch.arange(size) + 100,
        "item": torch.arange(size) % 3,
        "query": ragged_text([f"Q{i % 2}" for i in range(size)]),
        "history": Ragged.from_lists([list(range(i)) for i in range(size)]),
        "label": torch.zeros(size),
    }


def test_the_features_of_the_design_page_run():
    engine = FeatureEngine(
        [
            Feature("price").log1p(),
            Feature("age").bucketize([18, 25, 35, 50]),
            Feature("user"),
            Feature("query").hash("farm"),
            Feature("user_x_item").cross("user", "item"),
            Feature("history").truncate(2),
        ]
    )
    made = engine(Batch(batch_of()))
    assert set(made) == {*batch_of(), "user_x_item"}
    assert made["age"].tolist() == [0, 0, 1, 2]
    assert made["history"].to_lists() == [[], [0], [0, 1], [1, 2]]
    tables = EmbeddingEngine({"user_x_item": Table(dim=4), "query": Table(dim=2), "history": Table(dim=4)})
    assert tables(made)["user_x_item"].shape == (4, 4)


def test_entries_that_no_feature_names_pass_through_as_they_are():
    batch = batch_of()
    made = FeatureEngine([Feature("user"), Feature("x").select("item").mod(2)])(batch)
    for name, entry in batch.items():
        assert made[name] is entry
    assert made["x"].tolist() == [0, 1, 0, 0]


def test_a_feature_may_start_from_anothers_result_whatever_their_order():
    query = Feature("query").hash("murmur", bucket=10)
    crossed = Feature("x").cross("query", "item")
    again = Feature("y").select("x").mod(7)
    renamed = Feature("z").select("query")
    batch = batch_of()
    hashed = run(query, batch["query"])
    expected = FeatureEngine([Feature("x").cross("h", "item")])({"h": hashed, "item": batch["item"]})["x"]
    for features in ([query, crossed, again, renamed], [again, renamed, crossed, query]):
        made = FeatureEngine(features)(batch)
        assert torch.equal(made["x"], expected)
        assert torch.equal(made["y"], run(Feature("y").mod(7), expected))
        assert torch.equal(made["z"], hashed)


def test_raw_and_the_own_name_mean_the_column():
    batch = batch_of()
    made = FeatureEngine(
        [
            Feature("price").select("price").log1p(),
            Feature("bucket").select("price", raw=True).bucketize([5]),
            Feature("logged").select("price").bucketize([5]),
        ]
    )(batch)
    assert made["bucket"].tolist() == [0, 0, 1, 1]
    assert made["logged"].tolist() == [0, 0, 0, 0]


def test_numbered_results_can_be_used_by_others():
    made = FeatureEngine(
        [Feature("u").select("user").multi_hash([10, 10]), Feature("v").cross("u_1", "u_0")]
    )(batch_of())
    expected = FeatureEngine([Feature("v").cross("a", "b")])({"a": made["u_1"], "b": made["u_0"]})
    assert torch.equal(made["v"], expected["v"])
    assert "u" not in made


def test_a_circle_is_an_error_that_names_its_features():
    features = [Feature("a").select("b").mod(3), Feature("b").cross("c", "user"), Feature("c").select("a")]
    with pytest.raises(ValueError, match=r"need each other: \w → \w → \w → \w\.") as caught:
        FeatureEngine(features)
    assert all(name in str(caught.value) for name in "abc")


# Many features in one call


class Calls(TorchDispatchMode):
    """Counts the calls of each torch function."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(features, batch):
    engine = FeatureEngine(features)
    engine(batch)  # constants are made once
    with Calls() as calls:
        engine(batch)
    return calls.counts


def test_equal_ops_of_many_features_are_one_call(monkeypatch):
    names = [f"f{i}" for i in range(10)]
    numbers = {name: torch.rand(7) for name in names[:5]} | {
        name: Ragged.from_lists([[0.5], [], [1.5, 2]], dtype=torch.float32) for name in names[5:]
    }
    assert counted([Feature(n).log(2) for n in names], numbers)["log"] == 1
    calls = []  # log1p runs in the core, where torch does not see it
    core = _native.log1p
    monkeypatch.setattr(
        _native, "log1p", lambda values, *rest: (calls.append(list(map(len, values))), core(values, *rest))
    )
    FeatureEngine([Feature(n).log1p() for n in names])(numbers)
    assert calls == [[7] * 5 + [3] * 5]
    calls.clear()
    FeatureEngine([Feature(n).clip(0, i + 1).log1p() for i, n in enumerate(names)])(numbers)
    assert calls == [[7] * 5 + [3] * 5]
    assert counted([Feature(n).clip(0, i + 1) for i, n in enumerate(names)], numbers)["clamp"] == 1
    buckets = [Feature(n).bucketize([0.1 * i, 1 + i]) for i, n in enumerate(names)]
    assert counted(buckets, numbers)["searchsorted"] == 1
    ids = {name: torch.arange(9) for name in names}
    assert counted([Feature(n).mod(i + 3) for i, n in enumerate(names)], ids)["remainder"] == 1
    histories = {name: Ragged.from_lists([[1, 2, 3], [4]]) for name in names}
    assert counted([Feature(n).truncate(i + 1) for i, n in enumerate(names)], histories)["cumsum"] <= 3


@pytest.mark.parametrize("limits", [(0, None), (None, 3), (0.5, 2.5), (-3, 10**9)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]
)
def test_a_clip_before_log1p_is_made_in_the_same_pass_with_the_same_result(limits, dtype):
    values = torch.tensor([-2.0, -0.5, 0, 0.1, 0.5, 1, 2.5, 3, 7, 1000, float("inf"), float("nan")])
    values = values.to(dtype) if dtype.is_floating_point else values[:10].to(dtype)
    for entry in (values, values.reshape(-1, 2), Ragged(values), values.expand(3, -1).T[:, 1]):
        together = FeatureEngine([Feature("x").clip(*limits).log1p()])({"x": entry})["x"]
        clipped = FeatureEngine([Feature("x").clip(*limits)])({"x": entry})
        apart = FeatureEngine([Feature("x").log1p()])(clipped)["x"]
        # Of integers, torch makes the one and the core the other: they may differ in the last bits.
        torch.testing.assert_close(values_of(together), values_of(apart), rtol=3e-7, atol=0, equal_nan=True)


def test_a_gradient_passes_through_clip_and_log1p():
    x = torch.tensor([-1.0, 1.0, 5.0], requires_grad=True)
    FeatureEngine([Feature("x").clip(0, 3).log1p()])({"x": x})["x"].sum().backward()
    assert x.grad.tolist() == [0, 0.5, 0]


def test_steps_wait_for_equal_steps_further_down_other_chains():
    engine = FeatureEngine([Feature("a").clip(0, 1), Feature("b").log1p().clip(0, 2), Feature("c").mod(3)])
    stages = [(stage.kind.name, [name for name, _ in stage.steps]) for stage in engine.stages()]
    assert ("clip", ["a", "b"]) in stages
    assert len(stages) == 3


@pytest.mark.parametrize("seed", range(12))
def test_fused_equals_single_bit_for_bit_and_changes_no_input(seed):
    features, batch = many_features(seed)
    before = copy.deepcopy(batch)
    made = FeatureEngine(features)(batch)
    assert len(FeatureEngine(features).stages()) <= 40
    for feature in features:
        for name, expected in alone(feature, features, batch).items():
            assert same(made[name], expected), name
    for name, entry in before.items():
        assert same(entry, batch[name]), name


def test_long_columns_give_the_same_bits_together_as_alone():
    batch = {f"n{i}": torch.randn(10_000 + 37 * i) * 1000 for i in range(5)}
    features = [Feature(n).normalise(1.1 * i, 3.3).clip(0).log1p().round(2) for i, n in enumerate(batch)]
    made = FeatureEngine(features)(batch)
    for feature in features:
        assert same(made[feature.name], run(feature, batch[feature.name]))


def test_a_batch_without_rows_gives_features_without_rows():
    features, _ = many_features(0)
    batch = {n: e[:0] for n, e in many_features(1)[1].items() if isinstance(e, torch.Tensor)}
    empty = torch.zeros(1, dtype=torch.int64)
    for i in range(3):
        batch[f"r{i}"] = Ragged(torch.zeros(0), empty)
        batch[f"h{i}"] = Ragged(torch.zeros(0, dtype=torch.int64), empty)
        batch[f"t{i}"] = Ragged(torch.zeros(0, dtype=torch.uint8), empty)
        batch[f"l{i}"] = nested([])
    assert Batch(FeatureEngine(features)(batch)).samples == 0


def test_many_threads_may_share_an_engine():
    features, batch = many_features(3)
    engine = FeatureEngine(features)
    expected = engine(batch)
    with ThreadPoolExecutor(4) as pool:
        for made in pool.map(engine, [batch] * 16):
            assert all(same(made[name], entry) for name, entry in expected.items())


def test_constants_made_in_inference_mode_serve_autograd_later():
    engine = FeatureEngine([Feature("x").clip(0, 123.25).normalise(3.25, 7.5)])
    with torch.inference_mode():
        engine({"x": torch.ones(3)})
    x = torch.ones(3, requires_grad=True)
    engine({"x": x})["x"].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 1 / 7.5))


def test_users_can_add_ops_of_their_own():
    calls = []

    @dataclass(frozen=True)
    class Scale(ElementOp):
        by: float
        name: ClassVar[str] = "scale"

        def settings(self):
            return None

        def parameters(self, dtype):
            return (self.by,)

        def compute(self, values, *parameters):
            calls.append(len(values))
            return values * parameters[0]

    engine = FeatureEngine([Feature("a").then(Scale(2.0)), Feature("b").then(Scale(3.0))])
    made = engine({"a": torch.ones(2), "b": torch.ones(3)})
    assert made["a"].tolist() == [2, 2]
    assert made["b"].tolist() == [3, 3, 3]
    assert calls == [5]


def test_chains_are_values_that_no_method_changes():
    start = Feature("x")
    longer = start.mod(3)
    assert start == Feature("x")
    assert longer == Feature("x").mod(3)
    assert longer.mod(2) != longer
    assert hash(longer) == hash(Feature("x").mod(3))


def test_engines_can_be_pickled_and_find_their_words_in_another_process():
    engine = FeatureEngine([Feature("query").vocabulary(["Q1", "Q0"]), Feature("price").normalise()])
    engine.fit([batch_of()])
    script = "import pickle, sys; e, b = pickle.loads(bytes.fromhex(sys.stdin.read()))\n"
    script += "o = e.features[0].ops[0]\n"
    script += "print(e(b)['query'].tolist(), hash(o) == hash(type(o)(o.words, o.oov)))"
    sent = pickle.dumps((engine, {"query": batch_of()["query"], "price": torch.zeros(4)}))
    done = run_forked([sys.executable, "-c", script], sent.hex())
    assert done.stdout.split("\n")[0] == "[1, 0, 1, 0] True", done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("seed", range(6))
def test_a_gpu_gives_what_the_cpu_gives_and_fused_equals_single(seed):
    features, batch = many_features(seed)
    moved = {name: entry.to("cuda") for name, entry in batch.items()}
    made = FeatureEngine(features)(moved)
    expected = FeatureEngine(features)(batch)
    for feature in features:
        for name, single in alone(feature, features, moved).items():
            assert same(made[name], single), name
            values = made[name] if isinstance(made[name], torch.Tensor) else made[name].values
            assert values.is_cuda
            if values.is_floating_point():
                wanted = expected[name] if isinstance(expected[name], torch.Tensor) else expected[name].values
                torch.testing.assert_close(values.cpu(), wanted, equal_nan=True)
            else:
                assert same(made[name].to("cpu"), expected[name]), name
