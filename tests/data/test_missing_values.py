"""Missing values: the same table of cases in every format, frame and stream."""

import json
import math
from datetime import date

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import RECORDS, write

import karvan as kv
from karvan.cluster.batch_messages import pack, unpack
from karvan.data.columns.decoder import Decoder
from karvan.data.errors import DataError
from karvan.data.formats.recordio import RecordIOWriter
from karvan.data.in_memory import json_rows, record_batches
from karvan.ragged import Batch, NestedRagged, OptionalRagged, OptionalText, Ragged, join_batches, split_batch

# Column, its type, its values, and what a batch of all of them has.
CASES = [
    ("id", pa.int64(), [7, None, 9], [[7], [], [9]]),
    ("small", pa.int32(), [None, None, 1], [[], [], [1]]),
    ("flag", pa.bool_(), [True, None, False], [[True], [], [False]]),
    ("day", pa.date32(), [date(1970, 1, 2), None, None], [[1], [], []]),
    ("price", pa.float32(), [0.5, None, 1.5], [0.5, None, 1.5]),
    ("wide", pa.float64(), [None, 2.0, None], [None, 2.0, None]),
    ("query", pa.string(), ["ab", None, ""], [[b"ab"], [], [b""]]),
    ("history", pa.list_(pa.int64()), [[1, None, 2], None, []], [[1, 2], [], []]),
    ("scores", pa.list_(pa.float32()), [[0.5, None], None, []], [[0.5, None], [], []]),
    ("tags", pa.list_(pa.string()), [["a", "b"], None, []], [[b"a", b"b"], [], []]),
    ("full", pa.int64(), [1, 2, 3], [1, 2, 3]),
]
SCHEMA = pa.schema([(name, type_) for name, type_, _, _ in CASES])
TABLE = pa.table([pa.array(values, type_) for _, type_, values, _ in CASES], schema=SCHEMA)
EXPECTED = {name: expected for name, _, _, expected in CASES}


def rows(entry):
    """Plain rows, with None for NaN and strings as bytes."""
    if isinstance(entry, torch.Tensor):
        return [None if x != x else x for x in entry.tolist()]
    if isinstance(entry, NestedRagged):
        return [[bytes(text) for text in row] for row in entry.to_lists()]
    return [[None if x != x else x for x in row] for row in entry.to_lists()]


def check(batches, without=()):
    (batch,) = batches
    expected = {name: values for name, values in EXPECTED.items() if name not in without}
    assert {name: rows(entry) for name, entry in batch.items()} == expected
    assert isinstance(batch["id"], OptionalRagged)
    assert isinstance(batch["query"], OptionalText)


def in_csv(folder, delimiter=","):
    """Written by hand, since a writer would quote every string."""

    def cell(value):
        if isinstance(value, list):
            return "|".join("" if x is None else str(x) for x in value)
        return "" if value is None else '""' if value == "" else str(value)

    lines = [[name for name, *_ in CASES], *([cell(v) for v in row.values()] for row in TABLE.to_pylist())]
    path = folder / "rows.csv"
    path.write_text("".join(delimiter.join(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("kind", ["parquet", "orc", "arrow", "arrows"])
def test_missing_values_stay_visible_in_files(tmp_path, kind):
    check(kv.data.read(write(TABLE, tmp_path / f"rows.{kind}"), 3))


@pytest.mark.parametrize("kind", RECORDS)
def test_missing_values_stay_visible_in_records(tmp_path, kind):
    """Of tf.Example, which has neither dates nor null inside of a list."""
    held = [name for name in EXPECTED if name not in ("day", "history", "scores")]
    lists = pa.array([[1, 2], None, []], pa.list_(pa.int64()))
    path = write(TABLE.select(held).append_column("history", lists), tmp_path / f"rows.{kind}")
    options = {"schema": {"flag": "bool", "wide": "float64", "small": "int32"}}
    check(kv.data.read(path, 3, options=options), without=("day", "scores"))


@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("quoted_newlines", [True, False])
def test_missing_values_stay_visible_in_csv(tmp_path, delimiter, quoted_newlines):
    options = {"schema": SCHEMA, "delimiter": delimiter, "quoted_newlines": quoted_newlines}
    check(kv.data.read(in_csv(tmp_path, delimiter), 3, options=options))


def test_missing_values_of_integer_tables_stay_visible(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,\n,2\n,\n")
    (batch,) = kv.data.read(path, 3, options={"schema": {"a": "int64", "b": "float32"}})
    assert (rows(batch["a"]), rows(batch["b"])) == ([[1], [], []], [None, 2, None])


@pytest.mark.parametrize(
    "frame",
    [
        TABLE,
        TABLE.combine_chunks().to_batches()[0],
        "polars",  # whose threads no fork of the process that collects tests would have
        {name: values for name, _, values, _ in CASES},
        {name: TABLE[name] for name in EXPECTED},
    ],
    ids=["table", "records", "polars", "lists", "arrays"],
)
def test_missing_values_stay_visible_in_frames(frame):
    check(kv.data.read(pl.from_arrow(TABLE) if isinstance(frame, str) else frame, 3))


def test_missing_values_stay_visible_in_frames_of_pandas():
    frame = pd.DataFrame(
        {
            "id": pd.array([7, None, 9], "Int64"),
            "small": pd.array([pd.NA, pd.NA, 1], "Int32"),
            "flag": pd.array([True, None, False], "boolean"),
            "price": [0.5, np.nan, 1.5],
            "wide": pd.Series([None, 2.0, None], dtype=object),
            "query": ["ab", None, ""],
            "history": [[1, None, 2], None, []],
        }
    )
    check(kv.data.read(frame, 3), without=("day", "scores", "tags", "full"))
    for missing in (np.nan, pd.NA, None):
        for dtype in (object, "str", "category"):
            (batch,) = kv.data.read(pd.DataFrame({"q": pd.Series(["ab", missing, ""], dtype=dtype)}), 3)
            assert rows(batch["q"]) == EXPECTED["query"]
    times = pd.DataFrame({"t": pd.to_datetime(["1970-01-01", None])})
    (batch,) = kv.data.read(times, 2)
    assert rows(batch["t"]) == [[0], []]


def test_ids_that_pandas_has_made_floats_can_be_declared_integers():
    frame = pd.DataFrame({"id": [(1 << 40) + 1, None]})
    assert frame["id"].dtype == np.float64
    (batch,) = kv.data.read(frame, 2, columns=[kv.data.Fixed("id", dtype=torch.int64)])
    assert rows(batch["id"]) == [[(1 << 40) + 1], []]


def test_missing_values_stay_visible_in_arrays():
    data = {
        "q": np.array(["ab", np.nan, ""], object),
        "id": np.array([7, None, 9], object),
        "masked": np.ma.array([7, 8, 9], mask=[False, True, False]),
        "price": np.array([0.5, np.nan, 1.5]),
        "words": ["ab", math.nan, ""],
        "listed": [0.5, math.nan, 1.5],
        "t": np.array(["1970-01-01", "NaT", "1970-01-01"], "datetime64[us]"),
    }
    (batch,) = kv.data.read(data, 3)
    assert rows(batch["q"]) == rows(batch["words"]) == EXPECTED["query"]
    assert rows(batch["id"]) == rows(batch["masked"]) == EXPECTED["id"]
    assert rows(batch["price"]) == rows(batch["listed"]) == EXPECTED["price"]
    assert rows(batch["t"]) == [[0], [], [0]]


def test_missing_values_stay_visible_in_streams_of_dicts_and_of_json(tmp_path):
    decoder = Decoder(kv.data.infer(SCHEMA))
    dicts = [{k: v for k, v in row.items() if v is not None} for row in TABLE.to_pylist()]
    check(map(decoder, record_batches(dicts, 3, SCHEMA)))
    schema = SCHEMA.remove(SCHEMA.get_field_index("day"))  # JSON has no dates
    records = [json.dumps({k: v for k, v in row.items() if k != "day"}).encode() for row in dicts]
    check([Decoder(kv.data.infer(schema))(json_rows(schema)(records))], without=("day",))
    path = tmp_path / "x.recordio"
    with RecordIOWriter(path) as writer:
        for record in records:
            writer.write(record)
    check(kv.data.read(path, 3, options={"decode": json_rows(schema)}), without=("day",))


def test_a_type_that_the_first_rows_do_not_tell_is_told_by_later_ones():
    dicts = [{"a": None, "b": 1}, {"a": None}, {"a": "x", "b": 2}, {"a": None, "b": 3}]
    types = [batch.schema.field("a").type for batch in record_batches(dicts, 1)]
    assert types == [pa.null(), pa.null(), pa.string(), pa.string()]


def test_missing_values_of_partitions_stay_visible(tmp_path):
    for day in ("1", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"day={day}").mkdir()
        write(pa.table({"x": [1]}), tmp_path / f"day={day}" / "a.parquet")
    (batch,) = kv.data.read(tmp_path, 2)
    assert sorted(rows(batch["day"])) == [[], [1]]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (kv.data.Fixed("x", length=2), pa.array([[1, 2], [1, 2], [3, None]]), "Expected 2 integers"),
        (kv.data.Fixed("x", length=2), pa.array([[1, 2], [1, 2], None]), "Expected 2 integers"),
        (
            kv.data.Varlen("x"),
            pa.array([[], [(1, 1.0)], [(1, None)]], pa.map_(pa.int64(), pa.float32())),
            "The weight of an id is missing",
        ),
    ],
)
@pytest.mark.parametrize("shuffle", [0, 50])
def test_what_cannot_be_missing_is_an_error_that_names_file_and_record(
    tmp_path, column, values, message, shuffle
):
    write(pa.table({"x": pa.concat_arrays([values[:2]] * 4)}), tmp_path / "a.parquet")
    path = write(pa.table({"x": values}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=f"{path}, record 2, column 'x': {message}"):
        list(kv.data.read(tmp_path, 2, columns=[column], shuffle=shuffle))


ROWS = st.lists(
    st.fixed_dictionaries(
        {"id": st.none() | st.integers(0, 5), "text": st.none() | st.text("ab", max_size=2)}
    ),
    min_size=1,
    max_size=12,
)
DECODER = Decoder(kv.data.infer(pa.schema([("id", pa.int64()), ("text", pa.string())])))


def decoded(data):
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    return DECODER(pa.RecordBatch.from_pylist(data, schema))


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name in theirs:
        assert type(ours[name]) is type(theirs[name])
        assert rows(ours[name]) == rows(theirs[name])


@settings(deadline=None)
@given(ROWS, st.data())
def test_the_kind_of_an_entry_depends_on_its_own_rows_alone(data, draw):
    """However rows are cut and joined, a batch is what decoding its rows gives."""
    bounds = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=4)))
    counts = np.diff([0, *bounds, len(data)]).tolist()
    parts = split_batch(decoded(data), counts)
    ends = np.cumsum([0, *counts])
    for part, first, end in zip(parts, ends[:-1], ends[1:], strict=True):
        if end > first:
            same(part, decoded(data[first:end]))
    same(join_batches([part for part in parts if part.samples]), decoded(data))


def test_batches_with_missing_values_travel_as_they_are():
    batch = decoded([{"id": 1, "text": None}, {"id": None, "text": "a"}])
    message = pack(batch)
    same(unpack(message.head["batch"], message.arrays), batch)
    same(batch.to("cpu"), batch)


@given(ROWS)
def test_what_was_read_can_be_read_again(data):
    batch = decoded(data)
    (again,) = kv.data.read({"id": batch["id"]}, len(data))
    same(again, {"id": batch["id"]})


def test_strings_of_a_batch_can_be_read_again():
    batch = decoded([{"id": 1, "text": None}, {"id": None, "text": "a"}])
    (again,) = kv.data.read({"text": batch["text"]}, 2)
    same(again, {"text": batch["text"]})


def test_a_stream_asks_its_loader_for_labels():
    stream = kv.data.Stream(kv.data.read({"x": [1, None]}, 2))
    stream.require_values(["x"])
    with pytest.raises(DataError, match="record 1, column 'x': The label is missing"):
        next(stream)


def test_a_matrix_joins_lists_that_a_step_has_made_of_incomplete_rows():
    joined = join_batches(
        [Batch({"x": torch.tensor([[1, 2]])}), Batch({"x": Ragged.from_lists([[], [3, 4]])})]
    )
    assert joined["x"].to_lists() == [[1, 2], [], [3, 4]]


@pytest.mark.parametrize(
    ("type_", "good", "bad", "column", "message"),
    [
        (pa.float64(), 1.0, 1.5, kv.data.Fixed("x", dtype=torch.int64), "Expected whole numbers.* 1.5"),
        (pa.float64(), None, 2.0**60, kv.data.Fixed("x", dtype=torch.int64), r"below 2\*\*53.*Int64"),
        (
            pa.list_(pa.int64()),
            [1, 2],
            [3],
            kv.data.Fixed("x", length=2),
            "Expected 2 values, but there are 1",
        ),
        (pa.list_(pa.int64()), [], [3, 4], kv.data.Fixed("x"), "Expected 1 values, but there are 2"),
        (
            pa.list_(pa.float64()),
            [1.0, 2.0],
            [1.0, 0.5],
            kv.data.Fixed("x", length=2, dtype=torch.int64),
            "Expected whole numbers.* 0.5",
        ),
        (pa.int64(), 7, 2**32 + 7, kv.data.Fixed("x", dtype=torch.int32), r"torch\.int32.* got 4294967303"),
        (pa.int64(), None, -1, kv.data.Fixed("x", dtype=torch.uint8), r"torch\.uint8.* got -1\."),
        (pa.float64(), 7.0, 300.0, kv.data.Fixed("x", dtype=torch.uint8), r"torch\.uint8.* got 300\.0\."),
        (pa.int8(), 1, 2, kv.data.Fixed("x", dtype=torch.bool), r"torch\.bool.* got 2\."),
        (pa.uint64(), 1, 2**64 - 1, kv.data.Fixed("x", dtype=torch.float32), "got 18446744073709551615"),
        (
            pa.float64(),
            math.inf,
            1e300,
            kv.data.Fixed("x"),
            r"torch\.float32.* got 1e\+300.*dtype=torch\.float64",
        ),
        (pa.float32(), math.nan, 1e5, kv.data.Fixed("x", dtype=torch.float16), "float16.* got 100000"),
        (pa.decimal128(38, 0), 1, 10**37 * 5, kv.data.Fixed("x", dtype=torch.float16), "float16"),
        (
            pa.list_(pa.list_(pa.float64())),
            [[0.5], [], [1.0]],
            [[], [2.0, -1e39]],
            kv.data.Varlen("x"),
            r"torch\.float32.* got -1e\+39",
        ),
    ],
)
def test_a_value_that_is_not_as_declared_is_an_error_that_names_file_and_record(
    tmp_path, type_, good, bad, column, message
):
    records = pa.table({"x": pa.array([good] * 7 + [bad, good], type_)})
    path = write(records, tmp_path / "a.parquet", 3)
    with pytest.raises(DataError, match=rf"{path}, record 7, column 'x': .*{message}"):
        list(kv.data.read(path, 2, columns=[column], shuffle=4))


def test_ids_of_pandas_that_floats_round_are_an_error():
    frame = pd.DataFrame({"user": [2**60 + 1, 2**60 + 3, None]})
    with pytest.raises(DataError, match=r"record 0, column 'user': .*Int64"):
        list(kv.data.read(frame, 3, columns=[kv.data.Fixed("user", dtype=torch.int64)]))
    exact = pd.DataFrame({"user": pd.array([2**60 + 1, 2**60 + 3, None], "Int64")})
    (batch,) = kv.data.read(exact, 3)
    assert batch["user"].to_lists() == [[2**60 + 1], [2**60 + 3], []]


@pytest.mark.parametrize(
    ("type_", "column", "message"),
    [
        (
            pa.int64(),
            kv.data.Fixed("x", default=0.5),
            "default 0.5 .*int64.*dtype=torch.float32, default=0.5",
        ),
        (pa.int16(), kv.data.Fixed("x", default=math.nan), "default nan"),
        (pa.int64(), kv.data.Fixed("x", default=-1, dtype=torch.uint8), "default -1 .*uint8"),
        (pa.float64(), kv.data.Fixed("x", default=2**40, dtype=torch.int32), "default 1099511627776 .*int32"),
        (pa.bool_(), kv.data.Fixed("x", default=2), "default 2 .*bool"),
        (pa.list_(pa.int64()), kv.data.Fixed("x", default=[1, 0.5], length=2), "default 0.5 "),
        (pa.float32(), kv.data.Fixed("x", default=1e300), "default 1e.300 is beyond torch.float32"),
    ],
)
def test_a_default_that_would_become_another_number_is_an_error(type_, column, message):
    with pytest.raises(DataError, match=f"column 'x': The {message}"):
        kv.data.read(pa.table({"x": pa.array([None], type_)}), 1, columns=[column])


def test_defaults_and_ids_of_narrow_types_are_what_was_written():
    for type_ in (pa.int8(), pa.uint16(), pa.uint32()):
        table = pa.table({"x": pa.array([3, None], type_), "y": pa.array([3, 0], type_)})
        (batch,) = kv.data.read(table, 2, columns=[kv.data.Fixed("x", default=-1), "y"])
        assert batch["x"].tolist() == [3, -1]
    wide = pa.table({"x": pa.array([2**64 - 1, None, 1], pa.uint64())})
    (batch,) = kv.data.read(wide, 3, columns=[kv.data.Fixed("x", default=2**64 - 1)])
    assert batch["x"].tolist() == [-1, -1, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bool, torch.uint32])
def test_ids_of_narrow_types_are_those_of_int64(dtype):
    values = torch.tensor([1, 0, 1])
    engine = kv.EmbeddingEngine({"x": kv.Table(4), "y": kv.Table(4, name="x")})
    narrow = engine({"x": values.to(dtype), "y": values})
    assert torch.equal(narrow["x"], narrow["y"])
    if dtype is not torch.uint8:
        lists = kv.Ragged(values.to(dtype), torch.tensor([0, 1, 1, 3]))
        assert torch.equal(engine({"x": lists, "y": values})["x"][0], narrow["x"][0])
        hashed = kv.FeatureEngine([kv.Feature("x").hash("farm"), kv.Feature("z").cross("x", "y")])
        assert torch.equal(
            hashed({"x": values.to(dtype), "y": values})["z"], hashed({"x": values, "y": values})["z"]
        )


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.float(),
        lambda x: x.dtype,
        lambda x: x == 1,
        lambda x: 2 * (x > 1),
        lambda x: torch.ones(2) * x,
        lambda x: x[0],
        torch.log1p,
        lambda x: torch.cat([torch.ones(1), x]),
    ],
)
def test_code_for_tensors_is_told_of_missing_values_how_to_read_the_column(use, tmp_path):
    table = pa.table({"x": pa.array([1, 2, 3, None])})
    for number in range(2):
        pyarrow.parquet.write_table(table.slice(2 * number, 2), tmp_path / f"{number}.parquet")
    complete, missing = kv.data.read(str(tmp_path), 2)
    use(complete["x"])  # nothing is known of the second file
    first, _ = kv.data.read(table, 2)
    for batch, lacking in ((missing, 1), (first, 0)):
        with pytest.raises((AttributeError, TypeError), match=rf"as {lacking} of 2 here.*default=0"):
            use(batch["x"])
    for column in (kv.data.Fixed("x", default=0), kv.data.Varlen("x")):
        assert len({type(batch["x"]) for batch in kv.data.read(table, 2, columns=[column])}) == 1


@pytest.mark.parametrize("form", ["frame", "parquet", "partitions", "csv", "csv with a schema"])
@pytest.mark.parametrize("kind", ["numbers", "text"])
def test_a_column_that_lacks_a_value_somewhere_in_the_first_file_has_one_kind_in_all_batches(
    form, kind, tmp_path
):
    values = [1, 2, 3, None, 5, 6] if kind == "numbers" else ["a", "b", "c", None, "e", "f"]
    table = pa.table({"x": values, "y": range(6)})
    data, options = table, None
    if form in ("parquet", "partitions"):
        folder = tmp_path / ("day=1" if form == "partitions" else "")
        folder.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, folder / "part.parquet", row_group_size=2)
        data = str(tmp_path)
    elif form != "frame":
        data = str(tmp_path / "part.csv")
        pyarrow.csv.write_csv(table, data)
        options = {"schema": {"x": "int64" if kind == "numbers" else "string"}} if "schema" in form else None
    expected = OptionalRagged if kind == "numbers" else OptionalText
    seen = []

    def transform(batch):
        seen.append(type(batch["x"]))
        return batch

    for options_ in ({}, {"transform": transform}):
        batches = list(kv.data.read(data, 2, options=options, **options_))
        assert [type(batch["x"]) for batch in batches] == [expected] * 3
        assert [batch["x"].values.shape[0] for batch in batches] == [2, 1, 2]
        assert all(isinstance(batch["y"], torch.Tensor) for batch in batches)
    assert seen == [expected] * 3
    default = kv.data.Fixed("x", default=0) if kind == "numbers" else kv.data.Raw("x", default="")
    kinds = {type(batch["x"]) for batch in kv.data.read(data, 2, columns=[default], options=options)}
    assert kinds == {torch.Tensor if kind == "numbers" else Ragged}


def test_labels_and_metrics_take_columns_that_lack_values_elsewhere():
    whole, lacking = kv.data.read(pa.table({"label": [0, 1, None, 1]}), 2)
    auc = kv.metrics.AUC()
    auc.update(torch.tensor([0.1, 0.9]), whole)
    assert auc.compute() == 1.0
    with pytest.raises(ValueError, match="'label' has no value for 1 of 2 samples"):
        auc.update(torch.tensor([0.1, 0.9]), lacking)


@pytest.mark.parametrize(
    "feature",
    [kv.Feature("x").hash("farm"), kv.Feature("x").to_text(), kv.Feature("x").to_ids()],
)
def test_features_of_ids_that_became_floats_say_how_to_read_them(feature):
    engine = kv.FeatureEngine([feature])
    for table in ({"x": [1.0, None]}, {"x": [None, None]}):  # as pandas writes them; a day without a value
        with pytest.raises(TypeError, match=r"Feature 'x'.*Fixed\(…, dtype=torch.int64\)"):
            list(kv.data.read(table, 2, transform=engine))
        declared = [kv.data.Fixed("x", dtype=torch.int64)]
        assert len(list(kv.data.read(table, 2, columns=declared, transform=engine))) == 1
