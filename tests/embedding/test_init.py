"""Initialisers: what they pass to the native part, and what the native part makes of it."""

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pytest
import reference as ref
from hypothesis import given
from hypothesis import strategies as st

from karvan import _native
from karvan.embedding import init

MASK = (1 << 64) - 1
ALL = [
    init.Constant(0.5),
    init.Uniform(-0.5, 0.25),
    init.Normal(1.0, 0.5),
    init.TruncatedNormal(1.0, 0.5),
    init.TruncatedNormal(0.0, 1.0, -0.5, 2.0),
    init.XavierUniform(),
    init.XavierNormal(),
    init.KaimingUniform(),
    init.KaimingNormal(),
]


def rows(initialiser, keys, dim, seed=0, table="item"):
    out = np.full((len(keys), dim), np.nan, np.float32)
    _native.initialise(*initialiser.native(dim), seed, table, np.asarray(keys, np.int64), out)
    return out


def slow_bits(seed, table, key, column):
    """The 32 random bits of a column, from the definition in csrc/table/init.h."""
    stream = ref.mix(ref.mix(seed) + _native.farm64(table.encode()))
    state = ref.mix(ref.mix(key) ^ stream)
    drawn = ref.draw(state, column // 2)
    return drawn >> 32 if column % 2 else drawn & 0xFFFF_FFFF


KEYS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.integers(0, MASK), st.text(max_size=20), KEYS, st.integers(1, 150))
def test_uniform_equals_its_definition_bit_for_bit(seed, table, key, dim):
    low, high = np.float32(-0.3), np.float32(0.7)
    got = rows(init.Uniform(-0.3, 0.7), [key], dim, seed, table)[0]
    for column in range(dim):
        u = np.float32(slow_bits(seed, table, key, column) >> 8) * np.float32(2**-24)
        assert got[column] == min(low + (high - low) * u, np.nextafter(high, low))


@given(st.integers(0, MASK), st.text(max_size=20), KEYS, st.integers(1, 150))
def test_normal_is_the_quantile_of_its_draw(seed, table, key, dim):
    got = rows(init.Normal(0.0, 1.0), [key], dim, seed, table)[0]
    for column in range(dim):
        exact = NormalDist().inv_cdf((slow_bits(seed, table, key, column) + 0.5) * 2**-32)
        # Python's quantile is the same algorithm with libm's logarithm, so only the last bit may differ.
        assert abs(got[column] - np.float32(exact)) <= np.spacing(np.abs(np.float32(exact)))


@pytest.mark.parametrize("initialiser", ALL, ids=repr)
def test_a_key_starts_equal_whatever_its_neighbours_and_its_dim(initialiser):
    keys = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 300)
    together = rows(initialiser, keys, 16)
    assert np.isfinite(together).all()
    assert np.array_equal(together[::-1], rows(initialiser, keys[::-1].copy(), 16))
    assert np.array_equal(together[7:8], rows(initialiser, keys[7:8], 16))
    kind, a, b, lo, hi = initialiser.native(16)
    longer = np.empty((300, 33), np.float32)
    _native.initialise(kind, a, b, lo, hi, 0, "item", keys, longer)
    assert np.array_equal(together, longer[:, :16])


@pytest.mark.parametrize("initialiser", [i for i in ALL if not isinstance(i, init.Constant)], ids=repr)
def test_keys_tables_and_seeds_start_differently(initialiser):
    base = rows(initialiser, [1, 2], 8)
    assert (base[0] != base[1]).all()
    assert (base != rows(initialiser, [1, 2], 8, table="user")).all()
    assert (base != rows(initialiser, [1, 2], 8, seed=1)).all()


@pytest.mark.parametrize(
    ("initialiser", "mean", "std"),
    [
        (init.Uniform(-0.5, 0.25), -0.125, 0.75 / math.sqrt(12)),
        (init.Normal(1.0, 0.5), 1.0, 0.5),
        (init.TruncatedNormal(1.0, 0.5), 1.0, 0.5 * 0.8796257),  # a cut at two std leaves this part of it
        (init.XavierUniform(), 0.0, 1 / 4),
        (init.XavierNormal(2.0), 0.0, 2 / 4),
        (init.KaimingUniform(), 0.0, math.sqrt(2) / 4),
        (init.KaimingNormal(), 0.0, math.sqrt(2) / 4),
    ],
    ids=repr,
)
def test_mean_and_spread(initialiser, mean, std):
    values = rows(initialiser, np.arange(20000), 16).astype(np.float64)
    assert abs(values.mean() - mean) < 4 * std / math.sqrt(values.size)
    assert abs(values.std() / std - 1) < 0.005


def test_values_stay_in_their_range():
    values = rows(init.Uniform(1.0, 1.0 + 2**-21), np.arange(2000), 16)
    assert values.min() == 1.0
    assert values.max() < np.float32(1.0 + 2**-21)
    values = rows(init.TruncatedNormal(0.0, 1.0, -0.5, 2.0), np.arange(2000), 16)
    assert values.min() >= -0.5
    assert values.max() <= 2.0
    assert (rows(init.Constant(0.5), [1, 2], 5) == 0.5).all()


def test_what_goes_to_the_native_part():
    assert init.Constant().native(4) == ("constant", 0.0, 0.0, 0.0, 0.0)
    assert init.Uniform().native(4) == ("uniform", -0.01, 0.01, 0.0, 0.0)
    assert init.Normal().native(4) == ("normal", 0.0, 0.01, 0.0, 0.0)
    assert init.TruncatedNormal().native(4) == ("truncated_normal", 0.0, 0.01, -0.02, 0.02)
    assert init.TruncatedNormal(1.0, 2.0, low=0.0).native(4) == ("truncated_normal", 1.0, 2.0, 0.0, 5.0)
    assert init.XavierUniform().native(12) == ("uniform", pytest.approx(-0.5), pytest.approx(0.5), 0.0, 0.0)
    assert init.XavierNormal().native(4) == ("normal", 0.0, 0.5, 0.0, 0.0)
    assert init.KaimingUniform(1.0).native(12) == init.XavierUniform(1.0).native(12)
    assert init.KaimingNormal().native(2) == ("normal", 0.0, pytest.approx(1.0), 0.0, 0.0)


def test_initialisers_are_frozen_and_compare_by_value():
    for initialiser in ALL:
        assert isinstance(initialiser, init.Initialiser)
        assert initialiser == dataclasses.replace(initialiser)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(initialiser, dataclasses.fields(initialiser)[0].name, 3.0)
    assert init.XavierUniform(1.0) != init.KaimingUniform(1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: init.Constant(math.nan), r"Constant\(value=nan\) must have a finite float32 as value"),
        (lambda: init.Uniform(0.0, 1e39), "finite float32 as high, but it is 1e"),
        (lambda: init.Uniform(-3e38, 3e38), "finite float32 as width"),
        (lambda: init.Uniform(1.0, 0.0), r"Uniform\(low=1.0, high=0.0\) must have low <= high"),
        (lambda: init.Normal(0.0, -1.0), r"Normal\(mean=0.0, std=-1.0\) must have std >= 0"),
        (lambda: init.TruncatedNormal(std=0.0), "must have std > 0"),
        (lambda: init.TruncatedNormal(low=0.5), "must have low < high, but they are 0.5 and 0.02"),
        (lambda: init.TruncatedNormal(0.0, 1.0, 7.0, 8.0), "within 6 std of the mean"),
        (lambda: init.XavierNormal(-1.0), r"XavierNormal\(gain=-1.0\) must have gain >= 0"),
        (lambda: init.KaimingUniform(math.inf), "finite float32 as gain, but it is inf"),
        (lambda: init.XavierUniform().native(0), "needs a dim of at least 1, but dim is 0"),
    ],
)
def test_impossible_initialisers_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_native_part_refuses_what_it_does_not_know():
    keys, out = np.arange(2), np.empty((2, 4), np.float32)
    with pytest.raises(ValueError, match="received 'gaussian'"):
        _native.initialise("gaussian", 0, 1, 0, 0, 0, "item", keys, out)
    with pytest.raises(ValueError, match="one row for each of the 2 keys, but has 1"):
        _native.initialise("uniform", 0, 1, 0, 0, 0, "item", keys, out[:1])
    with pytest.raises(TypeError):
        _native.initialise("uniform", 0, 1, 0, 0, 0, "item", keys, out[:, ::2])
