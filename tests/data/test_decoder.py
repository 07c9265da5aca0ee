"""Decoded batches against plain Python over the rows' own values."""

import math

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan import ids
from karvan.data.columns.declarations import Fixed, Raw, Varlen, infer
from karvan.data.columns.decoder import Decoder
from karvan.data.columns.kinds import kind_of
from karvan.data.errors import DataError
from karvan.ragged import NestedRagged, OptionalRagged, OptionalText, Ragged

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


def present(got, dtype):
    """Rows of one value or none; a batch that lacks none has a plain tensor."""
    if isinstance(got, torch.Tensor):
        assert got.dtype == dtype
        return [[x] for x in got.tolist()]
    assert isinstance(got, OptionalRagged)
    assert got.values.dtype == dtype
    got.validate()
    assert got.values.shape[0] < got.rows
    return got.to_lists()


@given(
    rows_and_cut(maybe(st.integers(0, 100))),
    st.sampled_from(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]),
    st.booleans(),
)
def test_integers_of_any_width_are_int64_and_null_is_no_value(data, type_, dictionary):
    rows, cut = data
    array = pa.array(rows, getattr(pa, type_)())
    got = decode(array.dictionary_encode() if dictionary else array, Fixed("x"), cut)
    assert present(got, torch.int64) == [[] if x is None else [x] for x in rows[cut]]


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


@given(
    rows_and_cut(maybe(st.floats(width=16, allow_nan=False))),
    st.sampled_from(["float16", "float32", "float64"]),
    st.sampled_from([None, torch.float32, torch.float64]),
)
def test_a_null_float_is_nan(data, type_, dtype):
    rows, cut = data
    got = decode(pa.array(rows, getattr(pa, type_)()), Fixed("x", dtype=dtype), cut)
    assert got.dtype == (dtype or torch.float32)
    assert [None if math.isnan(x) else x for x in got.tolist()] == rows[cut]


@given(rows_and_cut(maybe(st.integers(-(1 << 20), 1 << 20))), st.sampled_from([torch.float32, torch.float64]))
def test_a_null_integer_that_is_read_as_a_float_is_nan(data, dtype):
    rows, cut = data
    got = decode(pa.array(rows, pa.int64()), Fixed("x", dtype=dtype), cut)
    assert got.dtype == dtype
    assert [None if math.isnan(x) else x for x in got.tolist()] == rows[cut]


@given(rows_and_cut(maybe(st.integers(0, 1 << 52))), st.booleans())
def test_ids_that_were_written_as_floats_can_be_read_as_integers(data, nan):
    rows, cut = data
    floats = [math.nan if x is None and nan else x for x in rows]
    got = decode(pa.array(floats, pa.float64()), Fixed("x", dtype=torch.int64), cut)
    assert present(got, torch.int64) == [[] if x is None else [x] for x in rows[cut]]


@pytest.mark.parametrize(
    ("type_", "limit"), [(pa.float64(), 1 << 53), (pa.float32(), 1 << 24), (pa.float16(), 1 << 11)]
)
def test_floats_that_integers_are_rounded_to_are_no_ids(type_, limit):
    def read(*values):
        floats = pa.array([float(v) for v in values], pa.float64()).cast(type_)
        return decode(floats, Fixed("x", dtype=torch.int64), slice(0, len(values)))

    assert read(limit - 1, 1 - limit).tolist() == [limit - 1, 1 - limit]
    for wrong in (limit, -limit):
        with pytest.raises(
            DataError, match=rf"column 'x': Expected integers below .*{wrong}.*Int64.*strings"
        ):
            read(1, wrong)


def test_a_fraction_is_no_integer():
    with pytest.raises(DataError, match=r"column 'x'.*1\.5"):
        decode(pa.array([1.5]), Fixed("x", dtype=torch.int64), slice(0, 1))


@given(rows_and_cut(maybe(st.booleans())))
def test_booleans_stay_and_null_is_no_value(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.bool_()), Fixed("x"), cut)
    assert present(got, torch.bool) == [[] if x is None else [x] for x in rows[cut]]


@given(rows_and_cut(lists(INT)), st.sampled_from([pa.list_, pa.large_list]))
def test_lists_of_ids_are_raggeds_without_the_nulls_inside(data, kind):
    rows, cut = data
    got = decode(pa.array(rows, kind(pa.int64())), Varlen("x"), cut)
    assert isinstance(got, Ragged)
    got.validate()
    assert got.to_lists() == [[x for x in row or [] if x is not None] for row in rows[cut]]


@given(rows_and_cut(lists(st.floats(width=16, allow_nan=False))))
def test_a_null_inside_a_list_of_floats_is_nan(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.list_(pa.float64())), Varlen("x"), cut)
    expected = [list(row or []) for row in rows[cut]]
    assert [[None if math.isnan(x) else x for x in row] for row in got.to_lists()] == expected


@given(rows_and_cut(lists(lists(INT))))
def test_lists_of_lists_are_nested_raggeds(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.list_(pa.list_(pa.int64()))), Varlen("x"), cut)
    assert isinstance(got, NestedRagged)
    assert got.to_lists() == [
        [[x for x in inner or [] if x is not None] for inner in row or []] for row in rows[cut]
    ]


@given(rows_and_cut(maybe(TEXT)), st.sampled_from(["string", "large_string", "string_view", "dictionary"]))
def test_strings_are_rows_of_bytes_and_null_is_no_string(data, type_):
    rows, cut = data
    array = pa.array(rows, pa.string())
    array = array.dictionary_encode() if type_ == "dictionary" else array.cast(getattr(pa, type_)())
    got = decode(array, Raw("x"), cut)
    assert got.values.dtype == torch.uint8
    if None in rows[cut]:
        assert isinstance(got, OptionalText)
        expected = [[] if x is None else [x.encode()] for x in rows[cut]]
        assert [[bytes(x) for x in row] for row in got.to_lists()] == expected
    else:
        assert [bytes(row) for row in got.to_lists()] == [x.encode() for x in rows[cut]]
    filled = decode(array, Raw("x", default="ö"), cut)
    assert [bytes(row) for row in filled.to_lists()] == [
        ("ö" if x is None else x).encode() for x in rows[cut]
    ]


def test_a_null_among_the_words_of_a_dictionary_is_null():
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None]), pa.array(["a", None]))
    got = decode(array, Raw("x"), slice(0, 4))
    assert [[bytes(x) for x in row] for row in got.to_lists()] == [[b"a"], [], [b"a"], []]
    assert decode(array, Varlen("x", "farm"), slice(0, 4)).lengths().tolist() == [1, 0, 1, 0]


@given(rows_and_cut(lists(TEXT)))
def test_lists_of_strings_are_nested_raggeds_of_bytes(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.list_(pa.string())), Raw("x"), cut)
    expected = [[x.encode() for x in row or [] if x is not None] for row in rows[cut]]
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
    expected = [[ids.farm(x) & ((1 << 63) - 1) for x in row or [] if x is not None] for row in rows[cut]]
    assert got.to_lists() == expected


PAIRS = maybe(st.lists(st.tuples(INT, st.floats(width=16, allow_nan=False)), max_size=3))


@given(rows_and_cut(PAIRS), st.booleans())
def test_ids_with_weights_are_weighted_raggeds(data, as_map):
    rows, cut = data
    if as_map:
        array = pa.array(rows, pa.map_(pa.int64(), pa.float32()))
    else:
        pairs = [row and [{"k": k, "v": v} for k, v in row] for row in rows]
        array = pa.array(pairs, pa.list_(pa.struct([("k", pa.int64()), ("v", pa.float64())])))
    got = decode(array, infer(pa.schema([("x", array.type)]))[0], cut)
    assert got.to_lists() == [[k for k, _ in row or []] for row in rows[cut]]
    assert got.weights.dtype == torch.float32
    assert got.weights.tolist() == [w for row in rows[cut] for _, w in row or []]


WEIGHTED = pa.list_(pa.struct([("k", pa.int64()), ("v", pa.float64())]))


def test_a_null_id_is_left_out_with_its_weight():
    rows = [[{"k": None, "v": 1.0}, {"k": 2, "v": 2.0}], [None, {"k": 3, "v": 3.0}], [{"k": None, "v": None}]]
    got = decode(pa.array(rows, WEIGHTED), Varlen("x"), slice(0, 3))
    assert (got.to_lists(), got.weights.tolist()) == ([[2], [3], []], [2.0, 3.0])


def test_a_null_weight_is_an_error_that_names_the_row():
    rows = [[], [{"k": 1, "v": 1.0}, {"k": 2, "v": None}]]
    with pytest.raises(DataError, match=r"row 1 of the records, column 'x': The weight of an id is missing"):
        decode(pa.array(rows, WEIGHTED), Varlen("x"), slice(0, 2))


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


@given(rows_and_cut(maybe(st.lists(maybe(st.floats(width=16, allow_nan=False)), min_size=2, max_size=2))))
def test_lists_of_floats_without_a_default_have_nan_for_what_is_missing(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.list_(pa.float32())), Fixed("x", length=2), cut)
    expected = [row or [None, None] for row in rows[cut]]
    assert [[None if math.isnan(x) else x for x in row] for row in got.tolist()] == expected


@pytest.mark.parametrize("row", [None, [], [1, None]])
@pytest.mark.parametrize("type_", [pa.int64(), pa.float64()])
def test_a_list_of_integers_with_a_missing_one_and_no_default_is_an_error(row, type_):
    array = pa.array([[1, 2], row], pa.list_(type_))
    column = Fixed("x", length=2, dtype=torch.int64)
    with pytest.raises(DataError, match=r"row 1 of the records, column 'x': Expected 2 integers.*default=0"):
        decode(array, column, slice(0, 2))
    filled = decode(array, Fixed("x", length=2, default=7, dtype=torch.int64), slice(0, 2))
    assert filled.tolist() == [[1, 2], [1, 7] if row else [7, 7]]


@given(rows_and_cut(maybe(st.lists(maybe(INT), min_size=1, max_size=1) | st.just([]))))
def test_lists_of_one_value_are_as_single_values(data):
    rows, cut = data
    got = decode(pa.array(rows, pa.list_(pa.int64())), Fixed("x"), cut)
    assert present(got, torch.int64) == [[] if not row or row[0] is None else row for row in rows[cut]]


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
    got = Decoder([*infer(schema)[:3], Fixed("m", default=0)])(rows)
    assert {name: value.tolist() for name, value in got.items()} == {
        "t": [2_000_000],
        "n": [3],
        "d": [4],
        "m": [0.0],
    }


def test_times_of_day_and_durations_become_microseconds():
    schema = pa.schema(
        [
            (str(type_), type_)
            for type_ in (pa.time32("s"), pa.time64("ns"), pa.duration("s"), pa.duration("ns"))
        ]
    )
    columns = [pa.array([2, None], pa.int32()), *(pa.array([5000, None], pa.int64()) for _ in range(3))]
    arrays = [column.cast(field.type) for column, field in zip(columns, schema, strict=True)]
    got = Decoder(infer(schema))(pa.RecordBatch.from_arrays(arrays, schema=schema))
    assert [entry.to_lists() for entry in got.values()] == [
        [[2_000_000], []],
        [[5], []],
        [[5_000_000_000], []],
        [[5], []],
    ]
    assert [kind_of(field.type) for field in schema] == ["times of day"] * 2 + ["durations"] * 2
    (lists,) = Decoder([Varlen("x")])(
        pa.RecordBatch.from_pydict({"x": pa.array([[1, 2], []], pa.list_(pa.duration("ms")))})
    ).values()
    assert lists.to_lists() == [[1000, 2000], []]


def test_no_copy_is_made_where_layouts_agree():
    array = pa.array(range(100), pa.int64())
    got = decode(array, Fixed("x"), slice(10, 20))
    assert got.data_ptr() == array.buffers()[1].address + 80
    strings = pa.array(["abc"] * 9)
    assert decode(strings, Raw("x"), slice(1, 9)).values.data_ptr() == strings.buffers()[2].address + 3


def test_null_dates_and_times_are_no_values():
    schema = pa.schema([("t", pa.timestamp("s")), ("d", pa.date32()), ("m", pa.decimal128(9, 2))])
    rows = pa.Table.from_pylist([{"t": 2, "d": 4, "m": 1}, {}], schema=schema).to_batches()[0]
    got = Decoder(infer(schema))(rows)
    assert (got["t"].to_lists(), got["d"].to_lists()) == ([[2_000_000], []], [[4], []])
    assert got["m"].tolist()[0] == 1
    assert got["m"].isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("column", "type_", "expected"),
    [
        (Fixed("x"), pa.null(), [None, None]),
        (Fixed("x", default=3), pa.null(), [3, 3]),
        (Fixed("x", dtype=torch.int64), pa.null(), [[], []]),
        (Fixed("x", default=3, length=2), pa.list_(pa.null()), [[3, 3], [3, 3]]),
        (Varlen("x"), pa.null(), [[], []]),
        (Varlen("x", "farm"), pa.list_(pa.null()), [[], []]),
        (Raw("x"), pa.null(), [[], []]),
    ],
)
def test_a_declared_column_needs_no_type(column, type_, expected):
    got = decode(pa.nulls(2, type_), column, slice(0, 2))
    rows = got.tolist() if isinstance(got, torch.Tensor) else got.to_lists()
    assert [None if x != x else x for x in rows] == expected


@pytest.mark.parametrize(
    ("column", "values", "row"),
    [
        (Fixed("x"), pa.array([1, 0, None]), 2),
        (Fixed("x"), pa.array([1.0, math.nan, None]), 1),
        (Fixed("x", default=0.0), pa.array([None, math.nan, 1.0]), 1),
        (Fixed("x", length=2), pa.array([[1.0, 2.0], None]), 1),
        (Fixed("x", length=2), pa.array([[1.0, 2.0], [1.0, None], [1.0, math.nan]]), 1),
        (Varlen("x"), pa.array([[1], [], None]), 2),
        (Raw("x"), pa.array(["", None]), 1),
    ],
)
def test_a_missing_label_is_an_error_that_names_the_row(column, values, row):
    records = pa.record_batch({"x": values})
    with pytest.raises(DataError, match=f"row {row} of the records, column 'x': The label is missing"):
        Decoder([column], labels=["x"])(records)
    Decoder([column], labels=["x"])(records.slice(0, row))


def test_a_declared_default_is_a_label():
    records = pa.record_batch({"x": pa.array([None, 1])})
    assert Decoder([Fixed("x", default=0)], labels=["x"])(records)["x"].tolist() == [0, 1]
    with pytest.raises(DataError, match=r"column 'y': Labels must .*\. The columns are: x"):
        Decoder([Fixed("x")], labels=["y"])


def test_dtype_can_be_asked_for():
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
        (Varlen("x"), pa.month_day_nano_interval(), "but the column's type is month_day_nano_interval"),
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
        pa.month_day_nano_interval(),
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


def test_a_decoder_of_names_is_an_error_that_says_how_to_infer_columns():
    with pytest.raises(TypeError, match=r"Varlen or Raw, got 'user'.*kv\.data\.infer"):
        Decoder(["user"])
