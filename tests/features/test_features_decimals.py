"""`to_ids()`: ids that a file has as text become the integers that they spell."""

import re

import pyarrow as pa
import pytest
import torch
from feature_helpers import chain, nested, ragged_text, run
from hypothesis import example, given
from hypothesis import strategies as st

import karvan as kv
from karvan.features import Feature, FeatureEngine
from karvan.features.ops.decimals import parse_anywhere

DECIMAL = re.compile(rb"-?[0-9]+")
NUMBER = (
    st.integers(-(1 << 63), (1 << 64) - 1)
    | st.integers(-100, 100)
    | st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**19, 10**19 - 1])
)
WORD = st.builds(
    lambda number, zeros: ("-" if number < 0 else "") + "0" * zeros + str(abs(number)),
    NUMBER,
    st.integers(0, 25),
)


def bits(word):
    """A number of 64 bits as a signed one; None for what is no such number."""
    if not DECIMAL.fullmatch(word):
        return None
    number = int(word)
    if not -(1 << 63) <= number < 1 << 64:
        return None
    return number - (1 << 64) if number >> 63 == 1 else number


@given(st.lists(WORD | st.just(""), max_size=8))
def test_strings_become_the_integers_that_they_spell_and_empty_ones_no_id(words):
    made = run(chain().to_ids(), ragged_text(words))
    assert made.values.dtype == torch.int64
    assert made.to_lists() == [[bits(word.encode())] if word else [] for word in words]


@given(st.lists(WORD, max_size=8))
def test_devices_without_arrow_make_the_same_of_them(words):
    entry = ragged_text(words)
    made = parse_anywhere(entry.values, entry.offsets[:-1], entry.offsets.diff())
    assert made.tolist() == [bits(word.encode()) for word in words]


@given(st.lists(st.lists(WORD | st.just(""), max_size=4), max_size=4))
def test_lists_of_strings_become_lists_of_ids(lists):
    entry = nested([[list(word.encode()) for word in row] for row in lists], torch.uint8)
    expected = [[bits(word.encode()) for word in row if word] for row in lists]
    assert run(chain().to_ids(), entry).to_lists() == expected


@given(
    st.lists(WORD, max_size=3),
    st.binary(min_size=1, max_size=4)
    | st.text("-0123456789+. e", min_size=1, max_size=22).map(str.encode)
    | st.integers(1 << 64, 1 << 80).map(lambda n: str(n).encode())
    | st.integers(-(1 << 80), -(1 << 63) - 1).map(lambda n: str(n).encode()),
    st.lists(WORD, max_size=3),
)
@example([], b"18446744073709551616", [])
@example([], b"-9223372036854775809", [])
@example([], b"-", [])
@example(["1"], b"1-2", ["2"])
@example([], b"0x1F", [])
def test_anything_else_is_an_error_that_shows_it_or_a_number(before, word, after):
    expected = bits(word)
    entry = ragged_text([*before, word, *after])
    if expected is not None:
        assert run(chain().to_ids(), entry).values[len(before)] == expected
        return
    with pytest.raises(ValueError, match=r"Feature 'x', to_ids: expected .*\.hash\(") as error:
        run(chain().to_ids(), entry)
    assert repr(word.decode(errors="replace")) in str(error.value)


def test_the_error_names_the_feature_though_several_are_parsed_at_once():
    engine = FeatureEngine([Feature(name).to_ids() for name in "abc"])
    with pytest.raises(ValueError, match=r"Feature 'b', to_ids: .* 'x7'"):
        engine({"a": ragged_text(["1"]), "b": ragged_text(["x7"]), "c": ragged_text(["2"])})


def test_ids_stay_as_they_are_and_other_numbers_ask_for_buckets():
    ids = torch.tensor([3, -1])
    assert run(chain().to_ids(), ids) is ids
    with pytest.raises(TypeError, match=r"to_ids: expected strings, or ids of torch.int64.*to_ids\(buckets="):
        run(chain().to_ids(), torch.tensor([1.5]))
    with pytest.raises(TypeError, match="to_ids: expected numbers"):
        run(chain().to_ids(10), ragged_text(["1"]))
    with pytest.raises(ValueError, match="default"):
        chain().to_ids(default=3)


def test_ids_in_a_cell_of_a_csv_share_rows_with_an_integer_column(tmp_path):
    (tmp_path / "clicks.csv").write_text("item,history\n7,1 7\n1,\n18446744073709551615,7  -1\n")
    features = FeatureEngine([Feature("history").split(" ").to_ids()])
    columns = [kv.data.Varlen("item"), kv.data.Raw("history")]
    (batch,) = kv.data.read(
        str(tmp_path / "clicks.csv"),
        10,
        columns=columns,
        options={"schema": pa.schema([("item", pa.uint64()), ("history", pa.string())])},
        transform=features,
    )
    assert batch["history"].to_lists() == [[1, 7], [], [7, -1]]
    engine = kv.EmbeddingEngine({"item": kv.Table(4), "history": kv.Table(4, name="item")})
    engine(batch)
    assert engine.sizes() == {"item": 3}
