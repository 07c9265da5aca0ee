"""Transforms of rows, columns and strings against Python lists."""

import pytest
import torch
from feature_helpers import (
    FLOATS,
    INT64,
    chain,
    nested,
    ragged_text,
    rows,
    run,
    slow_cross,
    strings_of,
    texts,
    weights_like,
)
from hypothesis import given
from hypothesis import strategies as st

from karvan.features import Feature, FeatureEngine
from karvan.features.ops.cross import murmur_words, murmur_words_anywhere
from karvan.ragged import Ragged

SIDES = st.sampled_from(["left", "right"])


def cut(row, length, side):
    return row[-length:] if side == "left" else row[:length]


@given(rows(INT64), st.integers(1, 10), SIDES)
def test_truncate_cuts_rows_and_weights(lists, length, side):
    weights = weights_like(lists)
    made = run(chain().truncate(length, side), Ragged.from_lists(lists, weights)).validate()
    expected = Ragged.from_lists(
        [cut(r, length, side) for r in lists], [cut(r, length, side) for r in weights]
    )
    assert made.equal(expected)


@given(rows(st.lists(INT64, max_size=4), max_length=4), st.integers(1, 5), SIDES)
def test_truncate_of_lists_of_lists_on_both_levels(lists, length, side):
    entry = nested(lists)
    outer = run(chain().truncate(length, side), entry)
    assert outer.to_lists() == [cut(row, length, side) for row in lists]
    inner = run(chain().truncate(length, side, level="inner"), entry)
    assert inner.to_lists() == [[cut(values, length, side) for values in row] for row in lists]


def test_truncate_of_a_tensor_cuts_columns():
    grid = torch.arange(24).reshape(2, 4, 3)
    assert torch.equal(run(chain().truncate(2), grid), grid[:, 2:])
    assert torch.equal(run(chain().truncate(2, "right"), grid), grid[:, :2])
    assert torch.equal(run(chain().truncate(9), grid), grid)


@given(rows(FLOATS), st.integers(1, 6), FLOATS)
def test_to_dense_and_back(lists, length, fill):
    lists = [[v for v in row if v != fill] for row in lists]
    entry = Ragged.from_lists(lists, dtype=torch.float32)
    dense = run(chain().to_dense(length, fill), entry)
    assert dense.shape == (len(lists), length)
    assert dense.tolist() == [row[:length] + [fill] * (length - len(row)) for row in lists]
    back = run(chain().to_dense(length, fill).to_ragged(pad=fill), entry)
    assert back.to_lists() == [row[:length] for row in lists]


@given(rows(INT64), st.integers(1, 9))
def test_to_dense_cut_on_the_left_keeps_the_last_values(lists, length):
    dense = run(chain().to_dense(length, -7, side="left"), Ragged.from_lists(lists))
    assert dense.tolist() == [[*row[-length:], *[-7] * (length - len(row))] for row in lists]


def test_to_ragged_without_padding_and_with_nan():
    assert run(chain().to_ragged(), torch.tensor([4, 5])).to_lists() == [[4], [5]]
    assert run(chain().to_ragged(), torch.zeros(0, 3)).rows == 0
    assert run(chain().to_ragged(), torch.arange(6).reshape(2, 3)).to_lists() == [[0, 1, 2], [3, 4, 5]]
    holes = torch.tensor([[1.0, float("nan")], [float("nan"), float("nan")]])
    assert run(chain().to_ragged(pad=float("nan")), holes).to_lists() == [[1.0], []]
    assert run(chain().to_ragged(pad=-1), torch.tensor([-1, 5])).to_lists() == [[], [5]]


@given(rows(INT64), INT64)
def test_fill_empty_gives_a_value_to_rows_without(lists, value):
    weights = weights_like(lists)
    made = run(chain().fill_empty(value), Ragged.from_lists(lists, weights))
    assert made.equal(Ragged.from_lists([r or [value] for r in lists], [r or [1.0] for r in weights]))


@given(rows(st.lists(INT64, max_size=4), max_length=4))
def test_flatten_drops_the_inner_lists(lists):
    assert run(chain().flatten(), nested(lists)).to_lists() == [
        [v for values in row for v in values] for row in lists
    ]


@given(rows(st.lists(INT64, max_size=4), max_length=4), st.integers(0, 2))
def test_fill_lists_adds_empty_lists_at_the_end(lists, more):
    length = max(1, *map(len, lists), 0) + more
    made = run(chain().fill_lists(length), nested(lists))
    assert made.to_lists() == [[*row, *([[]] * (length - len(row)))] for row in lists]


@st.composite
def columns(draw, count=None):
    """Two or three columns of ids with equally many rows."""
    count = count or draw(st.integers(2, 3))
    size = draw(st.integers(0, 5))
    few = st.integers(-2, 2) | INT64
    made = [draw(st.lists(st.lists(few, max_size=4), min_size=size, max_size=size)) for _ in range(count)]
    if draw(st.booleans()) and size:
        made[0][0] = draw(st.lists(few, min_size=1, max_size=4)) * 100
    return made


@given(columns(), st.booleans())
def test_cross_combines_distinct_ids_and_multiplies_weights(lists, weighted):
    weights = [weights_like(column, seed) for seed, column in enumerate(lists)]
    if weighted:
        weights[0] = [[1.0] * len(row) for row in lists[0]]
    batch = {
        f"c{i}": Ragged.from_lists(column, None if weighted and i == 0 else weights[i])
        for i, column in enumerate(lists)
    }
    made = FeatureEngine([Feature("x").cross(*batch)])(batch)["x"].validate()
    expected = slow_cross(lists, weights)
    assert made.to_lists() == [[key for key, _ in row] for row in expected]
    assert made.weights.tolist() == [weight for row in expected for _, weight in row]


@given(columns(2), st.lists(INT64, min_size=5, max_size=5))
def test_cross_of_tensors_with_raggeds(lists, keys):
    keys = keys[: len(lists[0])]
    batch = {"a": torch.tensor(keys, dtype=torch.int64), "b": Ragged.from_lists(lists[0])}
    made = FeatureEngine([Feature("x").cross("a", "b")])(batch)["x"]
    assert made.weights is None
    assert made.to_lists() == [[k for k, _ in row] for row in slow_cross([[[k] for k in keys], lists[0]])]


@given(st.lists(st.lists(INT64, min_size=3, max_size=3), min_size=1))
def test_hash_of_words_is_the_same_in_torch_and_in_native_code(words):
    words = torch.tensor(words)
    assert torch.equal(murmur_words(words), murmur_words_anywhere(words))


@given(columns(), st.booleans())
def test_concat_shifts_each_column_by_its_offset(lists, weighted):
    weights = [weights_like(lists[0])] + [[[1.0] * len(row) for row in column] for column in lists[1:]]
    lists = [[[v // 2 for v in row] for row in column] for column in lists]
    batch = {f"c{i}": Ragged.from_lists(column) for i, column in enumerate(lists)}
    if weighted:
        batch["c0"] = Ragged.from_lists(lists[0], weights[0])
    offsets = [0, 1000, 5][: len(lists)]
    made = FeatureEngine([Feature("x").concat(*batch, offsets=offsets)])(batch)["x"]
    expected = [
        [v + o for c, o in zip(lists, offsets, strict=True) for v in c[r]] for r in range(len(lists[0]))
    ]
    together = [[w for c in weights for w in c[r]] for r in range(len(lists[0]))]
    assert made.equal(Ragged.from_lists(expected, together if weighted else None))


def test_concat_of_tensors_gives_a_tensor():
    batch = {"a": torch.tensor([1, 2]), "b": torch.tensor([[3, 4], [5, 6]])}
    engine = FeatureEngine([Feature("x").concat("a", "b", offsets=[0, 10])])
    assert engine(batch)["x"].tolist() == [[1, 13, 14], [2, 15, 16]]
    nobody = {name: entry[:0] for name, entry in batch.items()}
    assert engine(nobody)["x"].shape == (0, 3)
    batch["b"] = Ragged.from_lists([[], [5, 6]])
    assert engine(batch)["x"].to_lists() == [[1], [2, 15, 16]]
    words = {"a": ragged_text(["x", ""]), "b": ragged_text(["yz", "w"])}
    assert strings_of(FeatureEngine([Feature("x").concat("a", "b")])(words)["x"]) == [b"xyz", b"w"]


@given(texts())
def test_lower_upper_and_strip_are_those_of_bytes(strings):
    encoded = [s.encode() for s in strings]
    entry = ragged_text(strings)
    assert strings_of(run(chain().lower(), entry)) == [s.lower() for s in encoded]
    assert strings_of(run(chain().upper(), entry)) == [s.upper() for s in encoded]
    assert strings_of(run(chain().strip(), entry)) == [s.strip() for s in encoded]
    lists = nested([[list(s) for s in encoded], []], torch.uint8)
    made = run(chain().strip().lower(), lists).to_lists()
    assert made == [[list(s.strip().lower()) for s in encoded], []]


@given(texts(), st.integers(-5, 5), st.none() | st.integers(0, 6))
def test_substring_is_a_slice(strings, start, length):
    def slow(s):
        tail = s[max(len(s) + start, 0) :] if start < 0 else s[start:]
        return tail if length is None else tail[:length]

    made = run(chain().substring(start, length), ragged_text(strings))
    assert strings_of(made) == [slow(s.encode()) for s in strings]


@given(texts())
def test_split_gives_the_parts_of_each_string(strings):
    made = run(chain().split(","), ragged_text(strings))
    parts = [[list(p) for p in s.encode().split(b",")] if s else [] for s in strings]
    assert made.to_lists() == parts


def test_strings_become_ids_in_one_chain():
    feature = chain().strip().lower().split("|").vocabulary(["news", "sport"], oov=1)
    made = run(feature, ragged_text([" News|SPORT ", "", "cars|news"]))
    assert made.to_lists() == [[0, 1], [], [2, 0]]


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [0, 1, 2, 9]])
def test_broken_offsets_are_refused_with_the_features_name(offsets):
    entry = Ragged(torch.arange(4), torch.tensor(offsets))
    with pytest.raises(ValueError, match=r"Feature 'x', truncate: Ragged offsets must"):
        run(chain().truncate(1), entry)
