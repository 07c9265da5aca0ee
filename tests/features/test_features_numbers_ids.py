"""Transforms of numbers and ids against Python's arithmetic."""

import math
from dataclasses import replace
from itertools import chain as join

import numpy as np
import pytest
import torch
from feature_helpers import FLOATS, INT64, chain, nested, ragged_text, rows, run, same, texts, weights_like
from hypothesis import given
from hypothesis import strategies as st

from karvan import ids
from karvan.features import Feature, FeatureEngine
from karvan.ragged import NestedRagged, OptionalRagged, Ragged

MASK = (1 << 64) - 1
NAN = math.nan


@given(rows(INT64), st.integers(1, (1 << 63) - 1) | st.integers(1, 50))
def test_mod_is_unsigned_and_keeps_rows_and_weights(lists, modulus):
    weights = weights_like(lists)
    made = run(chain().mod(modulus), Ragged.from_lists(lists, weights))
    assert made.to_lists() == [[(v & MASK) % modulus for v in row] for row in lists]
    assert made.equal(Ragged.from_lists(made.to_lists(), weights))


@given(rows(FLOATS), st.lists(FLOATS, min_size=1, max_size=8, unique=True).map(sorted))
def test_bucketize_counts_boundaries_not_above(lists, boundaries):
    made = run(chain().bucketize(boundaries), Ragged.from_lists(lists, dtype=torch.float32))
    assert made.values.dtype == torch.int64
    assert made.to_lists() == [[sum(b <= v for b in boundaries) for v in row] for row in lists]


def test_bucketize_of_integers_infinity_and_short_floats():
    feature = chain().bucketize([0.1, 2, 2.5])
    assert run(feature, torch.tensor([0, 1, 2, 3])).tolist() == [0, 1, 2, 3]
    assert run(feature, torch.tensor([math.inf, -math.inf])).tolist() == [3, 0]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert run(feature, torch.tensor([0.1, 2.5], dtype=dtype)).tolist() == [1, 3]  # at the boundary


TO_IDS = [chain().bucketize([0.0, 1.0]), chain().to_ids(10)]


@pytest.mark.parametrize("feature", TO_IDS)
@given(lists=rows(st.sampled_from([0.0, 1.0, 5.0, math.inf, -math.inf, NAN])))
def test_nan_becomes_no_id(feature, lists):
    entry = Ragged.from_lists(lists, dtype=torch.float32)
    weighted = Ragged(entry.values, entry.offsets, torch.arange(len(entry.values)) * 1.0)
    known = [[v for v in row if v == v] for row in lists]
    expected = run(feature, Ragged.from_lists(known, dtype=torch.float32)).to_lists()
    made = run(feature, weighted)
    assert made.to_lists() == expected
    assert made.weights.tolist() == [i for i, v in enumerate(entry.values.tolist()) if v == v]
    lists_of_one = NestedRagged(entry.values, entry.offsets, torch.tensor([0, len(lists)]))
    assert run(feature, lists_of_one).to_lists() == [expected]

    column = run(feature, entry.values)  # a column of one float per sample
    flat = join.from_iterable(expected)
    ids_of_samples = [[next(flat)] if v == v else [] for v in entry.values.tolist()]
    if all(ids_of_samples):
        assert column.tolist() == list(join.from_iterable(ids_of_samples))
    else:
        assert isinstance(column, OptionalRagged)
        assert column.to_lists() == ids_of_samples


@pytest.mark.parametrize("feature", TO_IDS)
def test_nan_that_a_step_makes_of_a_column_with_missing_integers_becomes_no_id(feature):
    column = OptionalRagged(torch.tensor([1, -1, 3]), torch.tensor([0, 1, 1, 2, 3]))
    logs = replace(feature, ops=(*chain().log().ops, *feature.ops))
    made = run(logs, column)
    assert isinstance(made, OptionalRagged)
    assert [bool(row) for row in made.to_lists()] == [True, False, False, True]


def test_nan_becomes_a_number_that_was_named_before_or_the_default():
    values = torch.tensor([NAN, 0.5, NAN])
    assert run(chain().fill_missing(-1).bucketize([0.0, 1.0]), values).tolist() == [0, 1, 0]
    assert run(chain().to_ids(10, default=0), values).tolist() == [0, 0, 0]
    assert run(chain().to_ids(10, default=7), values).tolist() == [7, 0, 7]


@pytest.mark.parametrize("feature", TO_IDS)
def test_nan_in_a_matrix_is_an_error_that_says_how_to_make_lists(feature):
    matrix = torch.tensor([[NAN, 5.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match=r"Feature 'x', .*NaN.*fill_missing.*to_ragged\(pad"):
        run(feature, matrix)
    lists = replace(feature, ops=(*chain().to_ragged(pad=NAN).ops, *feature.ops))
    assert [len(row) for row in run(lists, matrix).to_lists()] == [1, 2]


@given(rows(FLOATS))
def test_log1p_and_log(lists):
    lists = [[abs(v) for v in row] for row in lists]
    entry = Ragged.from_lists(lists, dtype=torch.float32)
    flat = entry.values.numpy().astype(np.float64)
    np.testing.assert_allclose(run(chain().log1p(), entry).values, np.log1p(flat), rtol=2e-6, atol=1e-44)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(run(chain().log(2), entry).values, np.log2(flat), rtol=2e-5, atol=1e-6)
    assert run(chain().log1p(), torch.tensor([0, 1])).dtype == torch.float32


@given(rows(FLOATS | st.just(NAN)), FLOATS, st.floats(0, 1e6, width=32))
def test_clip_moves_to_the_limits_and_keeps_nan(lists, low, span):
    made = run(chain().clip(low, low + span), Ragged.from_lists(lists, dtype=torch.float32))
    high = torch.tensor(low + span, dtype=torch.float32).item()
    assert np.array_equal(
        [v for row in made.to_lists() for v in row],
        [v if v != v else min(max(v, low), high) for row in lists for v in row],
        equal_nan=True,
    )


def test_clip_leaves_integers_integers_unless_limits_are_floats():
    values = torch.tensor([-(1 << 62) - 1, 5, (1 << 62) + 1])
    assert run(chain().clip(low=0), values).tolist() == [0, 5, (1 << 62) + 1]
    assert run(chain().clip(high=3), values.to(torch.int32)).tolist()[1] == 3
    assert run(chain().clip(0.5, 2.0), torch.tensor([0, 1, 3])).tolist() == [0.5, 1.0, 2.0]


@given(rows(FLOATS | st.just(NAN)), FLOATS)
def test_fill_missing_replaces_nan_only(lists, value):
    made = run(chain().fill_missing(value), Ragged.from_lists(lists, dtype=torch.float32))
    assert made.to_lists() == [[value if v != v else v for v in row] for row in lists]


@given(st.lists(st.none() | st.integers(-5, 5), max_size=8), st.integers(-9, 9), st.booleans())
def test_fill_missing_gives_every_sample_an_integer(rows, value, complete):
    rows = [0 if row is None and complete else row for row in rows]
    lists = Ragged.from_lists([[] if row is None else [row] for row in rows])
    for entry in (lists, OptionalRagged(lists.values, lists.offsets)):
        made = run(chain().fill_missing(value), entry)
        assert made.dtype == torch.int64
        assert made.tolist() == [value if row is None else row for row in rows]


def test_fill_missing_leaves_complete_integers_alone():
    assert run(chain().fill_missing(7), torch.tensor([1, 2])).tolist() == [1, 2]


def test_fill_missing_after_another_step_sees_the_samples_without_a_value():
    column = OptionalRagged(torch.tensor([0, 0]), torch.tensor([0, 1, 1, 2]))
    made = run(chain().log1p().fill_missing(-1), column)
    assert made.tolist() == [0.0, -1.0, 0.0]


def test_fill_missing_of_a_named_value():
    assert run(chain().fill_missing(7, missing=-1), torch.tensor([-1, 0, 3])).tolist() == [7, 0, 3]
    assert run(chain().fill_missing(0.5, missing=-1), torch.tensor([-1.0, 2])).tolist() == [0.5, 2.0]


@given(rows(st.floats(-1e6, 1e6, width=32)), st.integers(0, 2))
def test_round_is_half_to_even(lists, digits):
    made = run(chain().round(digits), Ragged.from_lists(lists, dtype=torch.float32))
    flat = np.array([v for row in lists for v in row], dtype=np.float32)
    np.testing.assert_allclose(
        made.values, np.round(flat.astype(np.float64), digits), rtol=1e-6, atol=0.011**digits
    )
    if not digits:
        assert made.values.tolist() == [float(round(v)) for v in flat.tolist()]


@given(
    rows(FLOATS | st.sampled_from([NAN, math.inf, -math.inf]) | st.floats(-2, 12, width=32)),
    st.integers(1, 10),
)
def test_to_ids_rounds_and_defaults_what_does_not_fit(lists, buckets):
    def slow(v):
        whole = round(v) if math.isfinite(v) else -1
        return whole if 0 <= whole < buckets else 3

    made = run(chain().to_ids(buckets, default=3), Ragged.from_lists(lists, dtype=torch.float32))
    assert made.to_lists() == [[slow(v) for v in row] for row in lists]


@given(rows(INT64), st.lists(st.integers(1, 10_000), min_size=1, max_size=4))
def test_multi_hash_follows_its_formula(lists, buckets):
    def prime(n):
        return all(n % d for d in range(2, math.isqrt(n) + 1))

    made = FeatureEngine([Feature("x").multi_hash(buckets)])({"x": Ragged.from_lists(lists)})
    names = ["x"] if len(buckets) == 1 else [f"x_{i}" for i in range(len(buckets))]
    for name, mul, scale, bucket in zip(names, (1, 3, 5, 7), (29, 47, 67, 83), buckets, strict=False):
        p = next(n for n in range(scale * bucket, 1, -1) if prime(n))
        wrapped = [[((v * mul + (1 << 63)) & MASK) - (1 << 63) for v in row] for row in lists]
        assert made[name].to_lists() == [[v % p % bucket for v in row] for row in wrapped]


@given(rows(INT64), st.integers(1, 3), st.integers(1, 100))
def test_hash_stack_puts_all_rounds_into_the_row(lists, rounds, size):
    weights = weights_like(lists)
    made = run(chain().hash_stack(rounds, size), Ragged.from_lists(lists, weights))

    def stacked(row):
        return ids.hash_stack(torch.tensor(row, dtype=torch.int64), rounds, size).flatten().tolist()

    assert made.to_lists() == [stacked(row) for row in lists]
    repeated = [[w for w in row for _ in range(rounds)] for row in weights]
    assert made.equal(Ragged.from_lists(made.to_lists(), repeated))


def test_hash_stack_of_tensors_and_lists_of_lists():
    grid = torch.arange(6).reshape(2, 3)
    expected = ids.hash_stack(grid, 2, 10).reshape(2, 6)
    assert torch.equal(run(chain().hash_stack(2, 10), grid), expected)
    lists = nested([[[0, 1], [2]], [[], [3, 4, 5]]])
    made = run(chain().hash_stack(2, 10), lists).to_lists()
    assert made == [[expected[0, :4].tolist(), expected[0, 4:].tolist()], [[], expected[1].tolist()]]


@given(rows(INT64), st.integers(0, 254))
def test_prefix_equals_the_function_of_ids(lists, group):
    entry = Ragged.from_lists(lists)
    assert torch.equal(run(chain().prefix(group, 8), entry).values, ids.prefix(entry.values, group, 8))


@given(texts(), st.sampled_from(["farm", "murmur"]))
def test_hash_gives_one_id_for_each_string(strings, kind):
    hashed = [getattr(ids, kind)(s) for s in strings]
    assert run(chain().hash(kind), ragged_text(strings)).tolist() == hashed
    lists = [[list(s.encode()) for s in strings], [], [list(s.encode()) for s in strings]]
    made = run(chain().hash(kind), nested(lists, torch.uint8))
    assert made.to_lists() == [hashed, [], hashed]


def test_hash_of_ids_hashes_their_eight_bytes():
    made = run(chain().hash("farm"), Ragged.from_lists([[-1, 5], []], [[0.5, 2.0], []]))
    assert made.to_lists() == [[ids.farm(b"\xff" * 8), ids.farm((5).to_bytes(8, "little"))], []]
    assert made.weights.tolist() == [0.5, 2.0]


@given(texts(), st.lists(st.text("aBz", max_size=3), min_size=1, unique=True), st.integers(0, 5))
def test_vocabulary_of_strings(strings, words, oov):
    def slow(s):
        if s in words:
            return words.index(s)
        return len(words) + (ids.farm(s) & MASK) % oov if oov else -1

    feature = chain().vocabulary(words, oov=oov)
    strings = strings + words
    assert run(feature, ragged_text(strings)).tolist() == [slow(s) for s in strings]
    lists = nested([[list(s.encode()) for s in strings], []], torch.uint8)
    assert run(feature, lists).to_lists() == [[slow(s) for s in strings], []]


@given(rows(INT64), st.lists(INT64, min_size=1, unique=True), st.integers(1, 3))
def test_vocabulary_of_ids(lists, words, oov):
    made = run(chain().vocabulary(words, oov=oov), Ragged.from_lists([*lists, words])).to_lists()
    assert made[-1] == list(range(len(words)))
    for row, found in zip(lists, made[:-1], strict=True):
        for value, place in zip(row, found, strict=True):
            assert place == words.index(value) if value in words else len(words) <= place < len(words) + oov


def test_numbers_may_be_nested_or_have_columns():
    lists = nested([[[1, 2], []], [], [[30]]])
    assert run(chain().mod(10), lists).to_lists() == [[[1, 2], []], [], [[0]]]
    grid = torch.arange(6.0).reshape(2, 3)
    assert same(run(chain().normalise(1, 2), grid), (grid - 1) / torch.tensor([2.0]))
    vectors = Ragged(torch.ones(3, 2), torch.tensor([0, 1, 3]))
    assert run(chain().log1p(), vectors).values.shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_keep_their_type(dtype):
    values = torch.tensor([0.25, 1.5], dtype=dtype)
    for feature in (
        chain().log1p(),
        chain().log(),
        chain().clip(0, 1),
        chain().normalise(1, 2),
        chain().round(),
    ):
        assert run(feature, values).dtype == dtype
