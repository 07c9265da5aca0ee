"""Decoded batches against plain Python over the rows' own values."""

import math

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan import ids
from karvan.data.columns import Fixed, Raw, Varlen, infer
from karvan.data.decode import Decoder
from karvan.data.errors import DataError
from karvan.ragged import NestedRagged, Ragged

INT = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(max_size=6)


def maybe(values):
    return st.none() | values


def lists(values):
    return maybe(st.lists(maybe(values), max_size=4))


def decode(array, column, cut):
    """The one column of the array's rows within `cut`, decoded from a slice as a loader makes them."""
    batch = pa.record_batch({column.name: array}).slice(cut.start, cut.stop - cut.start)
    return Decoder([column])(batch)[column.name]


@st.composite
def rows_and_cut(draw, values):
    rows = draw(st.lists(values, max_size=12))
    start = draw(st.integers(0, len(rows)))
    return rows, slice(start, draw(st.integers(start, len(rows))))


@given(rows_and_cut(maybe(INT)), INT)
def test_integers_are_int64_with_the_default_for_nulls(data, default):
    rows, cut = data
    got = decode(pa.array(rows, pa.int64()), Fixed("x", default=default), cut)
    assert got.dtype == torch.int64
    assert got.tolist() == [default if x is None else x for x in rows[cut]]


@given(
    rows_and_cut(maybe(st.integers(0, 100))),
    st.sampled_from(["int8", "int16", "int32", "uint8", "uint16", "uint32"]),
)
def test_narrow_integers_widen(data, type_):
    rows, cut = data
    got = decode(pa.array(rows, getattr(pa, type_)()), Fixed("x"), cut)
    assert (got.dtype, got.tolist()) == (torch.int64, [x or 0 for x in rows[cut]])


@given(rows_and_cut(maybe(st.integers(0, (1 << 64) - 1))))
def test_unsigned_ids_keep_their_bits(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.uint64()), Fixed("x", default=-1), cut)
    assert [x % (1 << 64) for x in got.tolist()] == [(1 << 64) - 1 if x is None else x for x in rows[cut]]


@given(
    rows_and_cut(maybe(st.floats(width=16, allow_nan=True))),
    st.sampled_from(["float16", "float32", "float64"]),
)
def test_floats_are_float32_and_nan_is_not_null(data, type_):
    rows, cut = data
    got = decode(pa.array(rows, getattr(pa, type_)()), Fixed("x", default=0.5), cut)
    assert got.dtype == torch.float32
    for mine, row in zip(got.tolist(), rows[cut], strict=True):
        assert mine == (0.5 if row is None else row) or (math.isnan(mine) and math.isnan(row))


@given(rows_and_cut(maybe(st.booleans())))
def test_booleans_stay(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.bool_()), Fixed("x"), cut)
    assert (got.dtype, got.tolist()) == (torch.bool, [bool(x) for x in rows[cut]])


@given(rows_and_cut(lists(INT)), st.sampled_from([pa.list_, pa.large_list]))
def test_lists_are_raggeds_with_empty_rows_for_nulls_and_zeros_inside(data, kind):
    rows, cut = data
    got = decode(pa.array(rows, kind(pa.int64())), Varlen("x"), cut)
    assert isinstance(got, Ragged)
    got.validate()
    assert got.to_lists() == [[x or 0 for x in row or []] for row in rows[cut]]


@given(rows_and_cut(lists(lists(INT))))
def test_lists_of_lists_are_nested_raggeds(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.list_(pa.list_(pa.int64()))), Varlen("x"), cut)
    assert isinstance(got, NestedRagged)
    assert got.to_lists() == [[[x or 0 for x in inner or []] for inner in row or []] for row in rows[cut]]


@given(rows_and_cut(maybe(TEXT)), st.sampled_from(["string", "large_string", "string_view", "dictionary"]))
def test_strings_are_rows_of_bytes(data, type_):
    rows, cut = data
    array = pa.array(rows, pa.string())
    array = array.dictionary_encode() if type_ == "dictionary" else array.cast(getattr(pa, type_)())
    got = decode(array, Raw("x"), cut)
    assert got.values.dtype == torch.uint8
    assert [bytes(row) for row in got.to_lists()] == [(x or "").encode() for x in rows[cut]]


@given(rows_and_cut(lists(TEXT)))
def test_lists_of_strings_are_nested_raggeds_of_bytes(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.list_(pa.string())), Raw("x"), cut)
    expected = [[(x or "").encode() for x in row or []] for row in rows[cut]]
    assert [[bytes(x) for x in row] for row in got.to_lists()] == expected


@given(
    rows_and_cut(maybe(TEXT)),
    st.sampled_from(["farm", "murmur"]),
    st.sampled_from([0, 1, 10, 1 << 40]),
    st.booleans(),
)
def test_hashing_on_read_follows_the_bucket_rules(data, name, bucket, dictionary):
    rows, cut = data
    array = pa.array(rows, pa.string())
    got = decode(array.dictionary_encode() if dictionary else array, Varlen("x", name, bucket), cut)
    hashed = [[] if x is None else [getattr(ids, name)(x) % (1 << 64)] for x in rows[cut]]
    assert got.to_lists() == [[h % bucket if bucket else h & ((1 << 63) - 1) for h in row] for row in hashed]


@given(rows_and_cut(lists(TEXT)), st.booleans())
def test_lists_of_strings_are_hashed_one_by_one(data, dictionary):
    rows, cut = data
    type_ = pa.list_(pa.dictionary(pa.int32(), pa.string()) if dictionary else pa.string())
    got = decode(pa.array(rows, type_), Varlen("x", "farm63"), cut)
    expected = [[ids.farm(x or "") & ((1 << 63) - 1) for x in row or []] for row in rows[cut]]
    assert got.to_lists() == expected


PAIRS = maybe(st.lists(st.tuples(INT, maybe(st.floats(width=16, allow_nan=False))), max_size=3))


@given(rows_and_cut(PAIRS), st.booleans())
def test_ids_with_weights_are_weighted_raggeds_and_missing_weights_are_one(data, as_map):
    rows, cut = data
    if as_map:
        array = pa.array(rows, pa.map_(pa.int64(), pa.float32()))
    else:
        pairs = [row and [{"k": k, "v": v} for k, v in row] for row in rows]
        array = pa.array(pairs, pa.list_(pa.struct([("k", pa.int64()), ("v", pa.float64())])))
    got = decode(array, infer(pa.schema([("x", array.type)]))[0], cut)
    assert got.to_lists() == [[k for k, _ in row or []] for row in rows[cut]]
    assert got.weights.dtype == torch.float32
    assert got.weights.tolist() == [1 if w is None else w for row in rows[cut] for _, w in row or []]


def test_strings_with_weights_are_hashed_and_one_pair_per_row_works():
    array = pa.array([{"k": "a", "v": 2.0}, None], pa.struct([("k", pa.string()), ("v", pa.float32())]))
    got = decode(array, Varlen("x", "farm"), slice(0, 2))
    assert got.to_lists() == [[ids.farm("a")], []]
    assert got.weights.tolist() == [2.0]


@given(rows_and_cut(maybe(st.lists(maybe(INT), min_size=2, max_size=2) | st.just([]))), st.booleans())
def test_fixed_lists_are_matrices_with_defaults_for_what_is_missing(data, fixed_size):
    rows, cut = data
    if fixed_size:
        rows = [row or None for row in rows]
    type_ = pa.list_(pa.int64(), 2) if fixed_size else pa.list_(pa.int64())
    got = decode(pa.array(rows, type_), Fixed("x", default=[7, 8], length=2), cut)
    expected = [
        [d if x is None else x for x, d in zip(row or [None, None], [7, 8], strict=True)] for row in rows
    ]
    assert got.shape == (len(expected[cut]), 2)
    assert got.tolist() == expected[cut]


@given(rows_and_cut(maybe(INT)))
def test_single_values_declared_varlen_have_one_value_or_none(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.int64()), Varlen("x"), cut)
    assert got.to_lists() == [[] if x is None else [x] for x in rows[cut]]


def test_dates_times_and_decimals_become_numbers():
    schema = pa.schema(
        [("t", pa.timestamp("s")), ("n", pa.timestamp("ns")), ("d", pa.date32()), ("m", pa.decimal128(9, 2))]
    )
    rows = pa.Table.from_pylist([{"t": 2, "n": 3500, "d": 4, "m": None}], schema=schema).to_batches()[0]
    got = Decoder(infer(schema))(rows)
    assert {name: value.tolist() for name, value in got.items()} == {
        "t": [2_000_000],
        "n": [3],
        "d": [4],
        "m": [0.0],
    }


def test_no_copy_is_made_where_layouts_agree():
    array = pa.array(range(100), pa.int64())
    got = decode(array, Fixed("x"), slice(10, 20))
    assert got.data_ptr() == array.buffers()[1].address + 80
    strings = pa.array(["abc"] * 9)
    assert decode(strings, Raw("x"), slice(1, 9)).values.data_ptr() == strings.buffers()[2].address + 3


def test_dtype_can_be_asked_for():
    assert decode(pa.array([1, None]), Fixed("x", dtype=torch.float32), slice(0, 2)).dtype == torch.float32
    exact = decode(pa.array([0.1, None]), Fixed("x", default=0.3, dtype=torch.float64), slice(0, 2))
    assert exact.tolist() == [0.1, 0.3]


@pytest.mark.parametrize(
    ("column", "type_", "message"),
    [
        (Fixed("x"), pa.string(), "Fixed expects numbers, but the column's type is string.*Raw"),
        (Fixed("x", length=2), pa.int64(), "expects lists of 2 numbers, but .* int64"),
        (Raw("x"), pa.int64(), "Raw expects strings or lists of strings, but .* int64"),
        (Varlen("x"), pa.string(), 'expects numbers, but .* string.*hash="farm"'),
        (Varlen("x", "farm"), pa.int64(), "expects strings to hash, but .* int64"),
        (Varlen("x"), pa.duration("s"), "but the column's type is duration"),
        (Fixed("y"), pa.int64(), "column 'y': The column is missing. The records' columns are: x"),
    ],
)
def test_a_column_that_cannot_be_read_as_declared_is_an_error(column, type_, message):
    decoder = Decoder([column])
    with pytest.raises(DataError, match=message):
        decoder.check(pa.schema([("x", type_)]))
    with pytest.raises(DataError, match=message):
        decoder(pa.record_batch({"x": pa.array([], type_)}))


def test_a_list_of_another_length_is_an_error_that_names_column_and_row():
    with pytest.raises(
        DataError, match=r"column 'x': Expected 2 values in each row, but row 1 of the batch has 3"
    ):
        decode(pa.array([[1, 2], [1, 2, 3]]), Fixed("x", length=2), slice(0, 2))


def test_what_cannot_be_inferred_is_an_error_that_names_the_column():
    for type_ in (
        pa.null(),
        pa.duration("s"),
        pa.list_(pa.list_(pa.string())),
        pa.struct([("a", pa.string())]),
    ):
        with pytest.raises(DataError, match="column 'x': Nothing can be inferred"):
            infer(pa.schema([("x", type_)]))


def test_declarations_are_checked():
    for make, message in [
        (lambda: Fixed("x", length=0), "length of at least 1"),
        (lambda: Fixed("x", default=[1, 2], length=3), "one default or 3"),
        (lambda: Varlen("x", hash="md5"), "Varlen 'x', hash expects one of 'farm', 'murmur'"),
        (lambda: Varlen("x", bucket=10), "no hash"),
        (lambda: Varlen("x", "farm", -1), "0 or more"),
        (lambda: Decoder([Fixed("x"), Raw("x")]), "declared twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_records_of_changing_schema_are_decoded_by_their_own():
    decoder = Decoder([Fixed("x")])
    assert decoder(pa.record_batch({"x": [1]}))["x"].dtype == torch.int64
    assert decoder(pa.record_batch({"y": [1], "x": [1.5]}))["x"].tolist() == [1.5]
