"""Steps that programs of other systems need, against Python lists."""

import math

import pytest
import torch
from feature_helpers import INT64, chain, nested, ragged_text, rows, run, same, slow_cross, strings_of, texts
from hypothesis import example, given
from hypothesis import strategies as st

from karvan import ids, kernels
from karvan.features import Feature, FeatureEngine
from karvan.features.ops.decimals import write_anywhere
from karvan.ragged import NestedRagged, OptionalRagged, OptionalText, Ragged

LIMITS = [-(1 << 63), (1 << 63) - 1, 0, -1, 9, 10, -10, 10**18, 10**18 - 1, -(10**18)]


def text_of(made):
    return [[bytes(word).decode() for word in row] for row in made.to_lists()]


@given(st.lists(INT64 | st.sampled_from(LIMITS), max_size=20))
@example(LIMITS)
def test_integers_become_their_decimal_text(numbers):
    made = run(chain().to_text(), torch.tensor(numbers, dtype=torch.int64)).validate()
    assert strings_of(made) == [str(number).encode() for number in numbers]
    text, offsets = write_anywhere(torch.tensor(numbers, dtype=torch.int64))
    assert strings_of(Ragged(text, offsets)) == strings_of(made)


@given(st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([0, 9, 10, 2**63 - 1, 2**63, 2**64 - 1])))
def test_unsigned_ids_become_their_own_decimal_text(numbers):
    unsigned = torch.tensor(numbers, dtype=torch.uint64)
    expected = [str(number).encode() for number in numbers]
    assert strings_of(run(chain().to_text(unsigned=True), unsigned.view(torch.int64))) == expected
    assert strings_of(run(chain().to_text(), unsigned)) == expected
    text, offsets = write_anywhere(unsigned.view(torch.int64), unsigned=True)
    assert strings_of(Ragged(text, offsets)) == expected


@given(rows(INT64, max_length=4))
def test_lists_of_integers_become_lists_of_text_and_back(lists):
    made = run(chain().to_text(), Ragged.from_lists(lists))
    assert text_of(made) == [[str(number) for number in row] for row in lists]
    assert run(chain().to_text().to_ids(), Ragged.from_lists(lists)).to_lists() == lists


def test_text_of_integers_hashes_as_in_tensorflow():
    hashed = chain().to_text().hash("farm", bucket=1000)
    assert run(hashed, torch.tensor([12, 345])).tolist() == [888, 678]
    assert run(hashed, torch.tensor([[12, 345]])).to_lists() == [[888, 678]]
    some = OptionalRagged(torch.tensor([12]), torch.tensor([0, 0, 1]))
    assert run(hashed, some).to_lists() == [[], [888]]
    assert run(hashed, ragged_text(["12", "345"])).tolist() == [888, 678]
    assert run(chain().hash("farm", bucket=1000), torch.tensor([12, 345])).tolist() == [312, 709]
    assert strings_of(run(chain().to_text(), torch.tensor([3, 200], dtype=torch.uint8))) == [b"3", b"200"]


NUMBER = st.floats(width=32, allow_nan=False).map(repr) | st.integers(-(10**20), 10**20).map(str)


@given(st.lists(NUMBER | st.just(""), max_size=8), st.none() | st.floats(width=32, allow_nan=False))
def test_strings_become_the_numbers_that_they_spell(words, default):
    feature = chain().to_numbers() if default is None else chain().to_numbers(default)
    other = math.nan if default is None else default
    expected = torch.tensor([float(word) if word else other for word in words], dtype=torch.float64)
    assert same(run(feature, ragged_text(words)), expected.to(torch.float32))
    lists = NestedRagged(*_parts(ragged_text(words)), torch.tensor([0, len(words), len(words)]))
    assert same(run(feature, lists).values, expected.to(torch.float32))


def _parts(strings):
    return strings.values, strings.offsets


def test_missing_strings_become_the_default_number():
    some = OptionalText(ragged_text(["1.5"]).values, torch.tensor([0, 3]), torch.tensor([0, 0, 1, 1]))
    assert run(chain().to_numbers(-1), some).tolist() == [-1, 1.5, -1]
    assert run(chain().to_numbers().fill_missing(0), some).tolist() == [0, 1.5, 0]
    assert run(chain().to_numbers(), torch.tensor([1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize("word", ["1_0", " 1", "1,5", "-", "one", "0x10"])
def test_strings_that_spell_no_number_are_an_error(word):
    with pytest.raises(ValueError, match=f"Feature 'x', to_numbers: expected decimal .* received '{word}'"):
        run(chain().to_numbers(), ragged_text(["1", word, "2"]))


def test_strings_on_a_gpu_become_no_numbers_and_the_error_says_where_they_do(monkeypatch):
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    with pytest.raises(TypeError, match=r"to_numbers: expected strings on the CPU, .* transform of a loader"):
        FeatureEngine([chain().to_numbers()])({"x": ragged_text(["1"])})


@given(texts())
def test_bytes_of_int8_are_strings(words):
    unsigned = ragged_text(words)
    signed = Ragged(unsigned.values.view(torch.int8), unsigned.offsets)
    steps = [
        chain().hash("farm"),
        chain().lower().strip().hash("murmur", bucket=7),
        chain().upper().substring(1, 3),
        chain().split(",").vocabulary(["a", "é"]),
    ]
    for feature in steps:
        assert same(run(feature, signed), run(feature, unsigned))
    assert torch.equal(ids.farm(signed), ids.farm(unsigned))
    engine = FeatureEngine([chain().vocabulary()])
    if any(words):
        assert same(engine.fit([{"x": signed}])({"x": signed})["x"], engine({"x": unsigned})["x"])


def test_numbers_of_int8_stay_numbers():
    entry = Ragged(torch.tensor([1, -2], dtype=torch.int8), torch.tensor([0, 2]))
    assert run(chain().clip(0, 5), entry).to_lists() == [[1, 0]]


@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
def test_a_vocabulary_from_a_file_is_that_of_its_lines(tmp_path, end):
    file = tmp_path / "words.txt"
    file.write_bytes(
        ("\r\n" if end == "\r\n" else "\n").join(["Roma", "Paris", "é x"]).encode() + end.encode()
    )
    column = ragged_text(["Paris", "é x", "Oslo", "Roma"])
    expected = run(chain().vocabulary(["Roma", "Paris", "é x"], oov=2), column)
    assert same(run(chain().vocabulary(file=file, oov=2), column), expected)
    assert same(run(chain().vocabulary(file=str(file), oov=2), column), expected)


def test_a_file_with_a_word_twice_or_a_line_without_one_is_an_error(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("a\nb\na\n")
    with pytest.raises(ValueError, match=r"Feature 'x', vocabulary: .* lines 1 and 3 have 'a'"):
        chain().vocabulary(file=file)
    file.write_text("a\n\nb\n")
    with pytest.raises(ValueError, match=r"line 2 of .*words.txt has none"):
        chain().vocabulary(file=file)
    with pytest.raises(ValueError, match="expected words or a file"):
        chain().vocabulary(["a"], file=file)


def top(row, weights, length):
    best = sorted(range(len(row)), key=lambda i: -weights[i])[:length]
    return [i for i in range(len(row)) if i in best]


@given(rows(INT64), st.integers(1, 5), st.randoms(use_true_random=False))
def test_truncate_to_the_top_keeps_the_largest_weights_in_their_order(lists, length, random):
    weights = [[random.choice([0.5, 1.0, 2.0, -1.0]) for _ in row] for row in lists]
    kept = [top(row, weight, length) for row, weight in zip(lists, weights, strict=True)]
    made = run(chain().truncate(length, "top"), Ragged.from_lists(lists, weights)).validate()
    expected = Ragged.from_lists(
        [[row[i] for i in at] for row, at in zip(lists, kept, strict=True)],
        [[row[i] for i in at] for row, at in zip(weights, kept, strict=True)],
    )
    assert made.equal(expected)


@given(rows(st.lists(INT64, max_size=4), max_length=4), st.integers(1, 5), st.booleans())
def test_truncate_with_check_lets_short_rows_pass_and_refuses_long_ones(lists, length, by_kernels):
    entry, flat = nested(lists), Ragged.from_lists([[len(values) for values in row] for row in lists])
    before = kernels.on_gpu
    kernels.on_gpu = lambda tensor: by_kernels
    try:
        for feature, column, longest, what in [
            (chain().truncate(length, check=True), entry, max(map(len, lists), default=0), "lists"),
            (chain().truncate(length, check=True), flat, max(map(len, lists), default=0), "values"),
            (
                chain().truncate(length, level="inner", check=True),
                entry,
                max((len(values) for row in lists for values in row), default=0),
                "values",
            ),
        ]:
            if longest <= length:
                assert run(feature, column).to_lists() == column.to_lists()
            else:
                with pytest.raises(ValueError, match=rf"'x', truncate: expected at most {length} {what}"):
                    run(feature, column)
    finally:
        kernels.on_gpu = before


def test_truncate_with_check_of_a_tensor_and_what_the_top_needs():
    with pytest.raises(ValueError, match="expected at most 2 values, but received rows of 3"):
        run(chain().truncate(2, check=True), torch.zeros(4, 3))
    with pytest.raises(TypeError, match="expected weights for the side 'top'"):
        run(chain().truncate(2, "top"), Ragged.from_lists([[1, 2, 3]]))
    with pytest.raises(ValueError, match="the level 'outer' for the side 'top'"):
        chain().truncate(2, "top", "inner")


@given(
    rows(st.lists(INT64, max_size=4), max_length=4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(["left", "right"]),
)
def test_lists_of_lists_become_a_tensor_of_three_dimensions(lists, outer, inner, side):
    def fitted(values, length, fill):
        return [*(values[-length:] if side == "left" else values[:length]), *[fill] * (length - len(values))]

    made = run(chain().to_dense([outer, inner], -7, side), nested(lists))
    expected = [
        [fitted(values, inner, -7) for values in row] for row in (fitted(row, outer, []) for row in lists)
    ]
    assert made.shape == (len(lists), outer, inner)
    assert made.tolist() == expected


def test_to_dense_needs_as_many_lengths_as_there_are_levels():
    with pytest.raises(TypeError, match=r"lists of lists have two lengths, as in to_dense\(\[10, 3\]\)"):
        run(chain().to_dense(3), nested([[[1]]]))
    with pytest.raises(TypeError, match=r"expected lists of lists .* for the lengths \[2, 3\]"):
        run(chain().to_dense([2, 3]), Ragged.from_lists([[1]]))
    with pytest.raises(ValueError, match="or two of them for lists of lists, but received 3"):
        chain().to_dense([1, 2, 3])


@given(st.integers(0, 5), st.integers(1, 6), st.randoms(use_true_random=False), st.booleans())
def test_trailing_pads_are_dropped_and_inner_ones_stay(count, width, random, floats):
    pad = math.nan if floats else -1
    grid = [[random.choice([pad, 1, 2]) for _ in range(width)] for _ in range(count)]
    dtype = torch.float32 if floats else torch.int64
    made = run(
        chain().to_ragged(pad=pad, trailing=True), torch.tensor(grid, dtype=dtype).reshape(count, width)
    )
    expected = []
    for row in grid:
        while row and (math.isnan(row[-1]) if floats else row[-1] == pad):
            row = row[:-1]
        expected.append(row)
    assert same(made, Ragged.from_lists(expected, dtype=dtype))


def test_trailing_needs_a_pad():
    with pytest.raises(ValueError, match="to_ragged expects a pad together with trailing=True"):
        chain().to_ragged(trailing=True)


@given(texts(",a b"))
def test_split_skips_empty_parts(words):
    made = run(chain().split(",", skip_empty=True), ragged_text(words))
    assert text_of(made) == [[part for part in word.split(",") if part] for word in words]


@st.composite
def nested_columns(draw):
    """Columns of lists of lists, equally many lists a row."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    few = st.integers(-2, 2) | INT64
    lists = st.lists(few, max_size=3)
    return [
        [draw(st.lists(lists, min_size=size, max_size=size)) for size in shape]
        for _ in range(draw(st.integers(2, 3)))
    ]


@given(nested_columns(), st.booleans())
def test_cross_of_lists_of_lists_crosses_list_by_list(columns, by_kernels):
    batch = {f"c{i}": nested(column) for i, column in enumerate(columns)}
    before = kernels.on_gpu
    kernels.on_gpu = lambda tensor: by_kernels
    try:
        made = FeatureEngine([Feature("x").cross(*batch)])(batch)["x"]
    finally:
        kernels.on_gpu = before
    flat = slow_cross([[values for row in column for values in row] for column in columns])
    assert isinstance(made, NestedRagged)
    assert torch.equal(made.outer, batch["c0"].outer)
    assert made.lists().to_lists() == [[key for key, _ in row] for row in flat]


def test_cross_refuses_lists_of_lists_that_do_not_match():
    engine = FeatureEngine([Feature("x").cross("a", "b")])
    with pytest.raises(ValueError, match=r"equally many lists a row in all columns, .* 1 and 2 in row 1"):
        engine({"a": nested([[[1]], [[1]], [[2], [3]]]), "b": nested([[[1]], [[1], [2]], [[3]]])})
    with pytest.raises(TypeError, match="or lists of lists in all columns, but received a NestedRagged"):
        engine({"a": nested([[[1]]]), "b": torch.tensor([1])})


@pytest.mark.parametrize(
    ("feature", "expected"),
    [
        (Feature("x", missing="empty"), [[], []]),
        (Feature("x", missing="empty").hash("farm").truncate(3), [[], []]),
        (Feature("x", missing="empty").split(",").hash("farm", bucket=9), [[], []]),
        (Feature("x", missing="empty").lower().vocabulary(["a"]), [[], []]),
        (Feature("x", missing="empty").vocabulary([3]), [[], []]),
        (Feature("x", missing="empty").bucketize([1.0]), [[], []]),
        (Feature("x", missing="empty").log1p().fill_missing(0), [0, 0]),
        (Feature("x", missing="empty").fill_missing(0.5), [0.5, 0.5]),
        (Feature("x", missing="empty").to_numbers(3), [3, 3]),
        (Feature("x", missing="empty").to_dense(2, -1), [[-1, -1]] * 2),
        (Feature("x", missing="empty").to_dense(1, 0.5), [[0.5]] * 2),
        (Feature("x", missing="empty").truncate(2, level="inner").flatten(), [[], []]),
        (Feature("x", missing="empty").cross("user", "other"), [[], []]),
        (Feature("x").select("other", missing="empty").mod(3), [[], []]),
        (Feature("x", missing="empty").concat("user", "other"), [[7], [8]]),
    ],
)
def test_a_feature_whose_column_a_batch_lacks_is_empty(feature, expected):
    made = FeatureEngine([feature])({"user": torch.tensor([7, 8])})["x"]
    assert (made.tolist() if isinstance(made, torch.Tensor) else made.to_lists()) == expected


def test_the_same_engine_takes_batches_with_and_without_a_column():
    engine = FeatureEngine([Feature("x", missing="empty").hash("farm", bucket=10)])
    assert engine({"x": ragged_text(["a"])})["x"].shape == (1,)
    assert engine({"user": torch.tensor([7, 8, 9])})["x"].to_lists() == [[], [], []]
    with pytest.raises(ValueError, match="the batch has no column at all"):
        engine({})
    with pytest.raises(ValueError, match="expects missing 'error' or 'empty', but received 'zero'"):
        Feature("x", missing="zero")
    with pytest.raises(KeyError, match="With missing='empty' the feature is empty"):
        FeatureEngine([Feature("x").mod(3)])({"user": torch.tensor([1])})
