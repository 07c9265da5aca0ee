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
    init.XavierUniform(fan_out=10240),
    init.Gamma(2.5, 0.3),
    init.Gamma(0.3, 2.0, low=0.1, high=3.0),
    init.Poisson(3.5),
    init.Poisson(40.0, low=10.0),
]
SKEWED = (init.Gamma, init.Poisson)  # whose values can be equal by chance


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


def slow_gamma(shape, stream):
    """Marsaglia and Tsang's method, from the definition in csrc/table/init.h."""
    d = (shape + 1 if shape < 1 else shape) - 1 / 3
    for attempt in range(1, 17):
        both = ref.draw(stream, attempt)
        z = NormalDist().inv_cdf(((both & 0xFFFF_FFFF) + 0.5) * 2**-32)
        root = 1 + z / math.sqrt(9 * d)
        if root > 0 and math.log(((both >> 32) + 0.5) * 2**-32) < z * z / 2 + d * (
            1 - root**3 + math.log(root**3)
        ):
            break
    boost = (((ref.draw(stream, 0) & 0xFFFF_FFFF) + 0.5) * 2**-32) ** (1 / shape) if shape < 1 else 1.0
    return d * root**3 * boost


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


@given(
    st.integers(0, MASK),
    KEYS,
    st.one_of(st.floats(2**-6, 1.0, width=32), st.floats(1.0, 1000.0, width=32)),
    st.integers(1, 20),
)
def test_gamma_is_drawn_by_its_definition(seed, key, shape, dim):
    got = rows(init.Gamma(shape, 2.0), [key], dim, seed)[0]
    state = ref.mix(ref.mix(key) ^ ref.mix(ref.mix(seed) + _native.farm64(b"item")))
    exact = [2.0 * slow_gamma(shape, ref.draw(state, column)) for column in range(dim)]
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-44)


@given(st.integers(0, MASK), KEYS, st.floats(0.0, 500.0, width=32), st.integers(1, 20))
def test_poisson_is_the_quantile_of_its_draw(seed, key, rate, dim):
    got = rows(init.Poisson(rate), [key], dim, seed)[0]
    for column in range(dim):
        u = (slow_bits(seed, "item", key, column) + 0.5) * 2**-32
        p = [math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) if rate else 0.0**k for k in range(900)]
        sums = np.cumsum(p)
        k = int(got[column])
        assert k == got[column]
        assert sums[k] > u - 1e-9
        assert k == 0 or sums[k - 1] < u + 1e-9


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
    differ = np.any if isinstance(initialiser, SKEWED) else np.all  # some may be equal by chance
    assert differ(base[0] != base[1])
    assert differ(base != rows(initialiser, [1, 2], 8, table="user"))
    assert differ(base != rows(initialiser, [1, 2], 8, seed=1))


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
        (init.XavierUniform(fan_out=10240), 0.0, math.sqrt(2 / (16 + 10240))),
        (init.KaimingNormal(1.0, fan_in=100), 0.0, 0.1),
        (init.TruncatedNormal(0.0, 0.02, -2.0, 2.0), 0.0, 0.02),
        (init.Gamma(2.5, 0.3), 0.75, 0.3 * math.sqrt(2.5)),
        (init.Gamma(0.3, 2.0), 0.6, 2.0 * math.sqrt(0.3)),
        (init.Poisson(3.5), 3.5, math.sqrt(3.5)),
        (init.Poisson(40.0), 40.0, math.sqrt(40.0)),
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
    values = rows(init.Gamma(0.3, 2.0, low=0.1, high=3.0), np.arange(2000), 16)
    assert (values.min(), values.max()) == (np.float32(0.1), 3.0)
    values = rows(init.Poisson(3.5, low=1.0, high=5.0), np.arange(2000), 16)
    assert sorted(set(values.ravel())) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert not rows(init.Poisson(0.0), [1, 2], 5).any()
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
    recis = init.XavierUniform(fan_out=10240).native(16)
    assert recis == ("uniform", pytest.approx(-0.02418726), pytest.approx(0.02418726), 0.0, 0.0)
    assert init.XavierUniform(1.0, 16, 10240).native(7) == recis
    assert init.XavierNormal(2.0, fan_in=3, fan_out=5).native(9) == ("normal", 0.0, 1.0, 0.0, 0.0)
    assert init.KaimingUniform(1.0, fan_in=3).native(9) == ("uniform", -1.0, 1.0, 0.0, 0.0)
    assert init.Gamma(2.0, 3.0, high=9.0).native(4) == ("gamma", 2.0, 3.0, -3.4028234663852886e38, 9.0)
    assert init.Poisson(2.0, low=1.0).native(4) == ("poisson", 2.0, 0.0, 1.0, 3.4028234663852886e38)
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
        (lambda: init.XavierNormal(-1.0), r"XavierNormal\(gain=-1.0, .* must have gain >= 0"),
        (lambda: init.KaimingUniform(math.inf), "finite float32 as gain, but it is inf"),
        (lambda: init.XavierUniform(fan_out=0), "must have a fan_out of at least 1, or None for dim"),
        (lambda: init.KaimingNormal(fan_in=-2), "must have a fan_in of at least 1"),
        (lambda: init.Gamma(0.0, 1.0), r"Gamma\(shape=0.0, .* must have a shape from 1e-6 to 1e6"),
        (lambda: init.Gamma(1.0, 0.0), "must have scale > 0"),
        (lambda: init.Gamma(1.0, 1.0, low=2.0, high=1.0), "must have low <= high"),
        (lambda: init.Poisson(501.0), r"Poisson\(rate=501.0, .* must have a rate from 0 to 500"),
        (lambda: init.Poisson(math.nan), "finite float32 as rate"),
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
