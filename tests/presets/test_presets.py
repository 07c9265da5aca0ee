"""Presets: the numbers that programs of PERSIA and RecIS have, from slow formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.presets import persia, recis

KEYS = torch.tensor([1, 2])
numbers = st.floats(-50, 50, width=32)


def train(engine, optimizer, gradient):
    (engine({"f": KEYS})["f"] * gradient).sum().backward()
    optimizer.step()


@given(
    gradients=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), lr=st.sampled_from([0.01, 3.0])
)
def test_adagrad_of_persia_divides_by_the_old_accumulator_and_stays_within_its_bound(gradients, lr):
    engine = kv.EmbeddingEngine({"f": persia.table(2)})
    optimizer = persia.adagrad(engine, lr=lr)
    vector = engine({"f": KEYS})["f"].detach().double()
    assert vector.abs().max() <= 0.01
    accumulator = torch.full((2, 2), 0.01, dtype=torch.float64)
    for gradient in gradients:
        train(engine, optimizer, torch.tensor(gradient))
        g = torch.tensor([gradient, gradient], dtype=torch.float64)
        vector = (vector - lr * g / (accumulator.sqrt() + 1e-10)).clamp(-10, 10)
        accumulator = accumulator + g * g
    torch.testing.assert_close(engine.table("f").vectors(KEYS).double(), vector, rtol=1e-4, atol=1e-5)


def test_persia_draws_at_every_miss_and_admits_all_without_a_probability():
    assert persia.table(4).admit == kv.admission.Always()
    table = persia.table(4, "users", admit_probability=0.1, combiner="sqrtn")
    assert (table.name, table.combiner, table.dim) == ("users", "sqrtn", 4)
    assert table.admit == kv.admission.Probability(0.1, each=True)
    assert persia.table(4, admit=kv.admission.MinCount(2)).admit == kv.admission.MinCount(2)
    with pytest.raises(ValueError, match="admit or admit_probability, got both"):
        persia.table(4, admit=kv.admission.Always(), admit_probability=0.5)


@pytest.mark.parametrize("make", [persia.adagrad, persia.adam, persia.sgd])
def test_all_optimizers_of_persia_have_the_bound_unless_another_is_given(make):
    assert make().defaults["weight_bound"] == 10.0
    assert make(weight_bound=None).defaults["weight_bound"] is None
    assert make(lr=0.5).defaults["lr"] == 0.5


def test_rows_of_recis_start_as_zeros():
    engine = kv.EmbeddingEngine({"f": recis.table(4), "g": recis.table(4, init=recis.xavier_uniform())})
    out = engine({"f": KEYS, "g": KEYS})
    assert not out["f"].any()
    assert 0 < out["g"].abs().max() <= (6 / (4 + 10240)) ** 0.5
    assert engine.table("f").rows == 2


@pytest.mark.parametrize(("samples", "by_count"), [(2, False), (9, True)])
def test_combiners_of_recis_treat_weights_as_it_does(samples, by_count):
    tables = {
        name: recis.table(1, "t", combiner=name, init=kv.init.Constant(1.0)) for name in ("sum", "mean")
    }
    tables["tile"] = recis.table(1, "t", combiner="tile", length=3, init=kv.init.Constant(1.0))
    engine = kv.EmbeddingEngine(tables)
    weights = [0.5, 2.0, 3.0, 0.5, 1.0, 2.0]
    rows = kv.Ragged.from_lists([[1] * 6] * samples, weights=[weights] * samples)
    out = {name: value[0].tolist() for name, value in engine(dict.fromkeys(tables, rows)).items()}
    expected = sum(weights) / 6 if by_count else 1.0
    assert out == {"sum": [9.0], "mean": [pytest.approx(expected)], "tile": [1.0, 1.0, 1.0]}


def test_initialisers_and_the_filter_of_recis():
    assert recis.xavier_uniform() == kv.init.XavierUniform(fan_out=10240)
    assert recis.xavier_normal(2.0, block_size=100) == kv.init.XavierNormal(2.0, fan_out=100)
    assert recis.truncated_normal(std=0.02) == kv.init.TruncatedNormal(0.0, 0.02, -2.0, 2.0)
    assert recis.global_step_filter(1, every=1) == kv.eviction.Age(0, every=1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        recis.global_step_filter(0)


def test_presets_are_public():
    assert kv.presets.persia is persia
    assert kv.presets.recis is recis
