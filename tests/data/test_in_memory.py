"""In-memory sources and iterables of dicts."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import assert_same, read_all, table

from karvan.data.columns.declarations import infer
from karvan.data.columns.decoder import Decoder
from karvan.data.errors import DataError
from karvan.data.in_memory import open_frame, record_batches
from karvan.data.source import Split
from karvan.ragged import Batch, NestedRagged, Ragged


def whole(source):
    records = read_all(source).combine_chunks().to_batches()[0]
    return Decoder(infer(source.schema))(records)


def test_arrays_tensors_and_raggeds_come_back_as_they_were():
    data = {
        "user": torch.tensor([1, -2, 3]),
        "price": torch.tensor([0.5, 1.5, float("inf")]),
        "vector": torch.arange(6.0).reshape(3, 2),
        "clicked": torch.tensor([True, False, True]),
        "history": Ragged.from_lists([[1, 2], [], [3]]),
        "weighted": Ragged(torch.tensor([1, 2]), torch.tensor([0, 1, 1, 2]), torch.tensor([0.5, 2.0])),
        "nested": NestedRagged(torch.arange(3), torch.tensor([0, 1, 3]), torch.tensor([0, 2, 2, 2])),
    }
    assert_same(whole(open_frame(data)), Batch(data))


def test_numpy_arrays_and_lists_of_strings_work():
    source = open_frame(
        {"id": np.array([(1 << 64) - 1], np.uint64), "q": ["x"], "m": np.ones((1, 3), np.float32)}
    )
    got = whole(source)
    assert got["id"].tolist() == [-1]
    assert got["q"].to_lists() == [[120]]
    assert got["m"].tolist() == [[1.0, 1.0, 1.0]]


def test_tables_and_frames_of_pandas_and_polars_give_the_same_batches():
    rows = table(50).drop_columns(["interests", "price"])
    expected = whole(open_frame(rows))
    assert_same(whole(open_frame(rows.combine_chunks().to_batches()[0])), expected)
    assert_same(whole(open_frame(pl.from_arrow(rows))), expected)
    frame = pd.DataFrame(rows.drop_columns(["sessions"]).to_pylist())
    ours = whole(open_frame(frame))
    assert_same(ours, Batch({name: expected[name] for name in ours}))


@given(st.integers(0, 30), st.integers(0, 30))
def test_splits_of_a_table_are_its_rows(first, count):
    source = open_frame(pa.concat_tables([pa.table({"a": range(15)})] * 2))
    split = Split("memory", first, count)
    if first + count > 30:
        with pytest.raises(DataError, match="but there are 30"):
            list(source.read(split))
    else:
        got = [x for batch in source.read(split) for x in batch["a"].to_pylist()]
        assert got == [*range(15), *range(15)][first : first + count]


def test_what_is_no_data_is_an_error():
    with pytest.raises(TypeError, match="but received int"):
        open_frame(3)
    with pytest.raises(DataError, match="equally many rows"):
        open_frame({"a": [1], "b": [1, 2]})
    with pytest.raises(DataError, match="column 'a'"):
        open_frame({"a": np.zeros((1, 2, 3))})
    with pytest.raises(DataError, match="Expected a split of 'memory'"):
        list(open_frame({"a": [1]}).read(Split("x", 0, 1)))


@pytest.mark.parametrize("value", [3, "abc", b"abc", iter([1, 2])])
def test_a_column_that_is_one_value_is_an_error_that_names_it(value):
    with pytest.raises(DataError, match=r"column 'a': Expected an array"):
        open_frame({"a": value})


@pytest.mark.parametrize("library", [pd.Series, pl.Series])
def test_a_series_is_no_frame(library):
    with pytest.raises(TypeError, match="received a Series: give it"):
        open_frame(library([1, 2]))


def test_tensors_of_bfloat16_are_numbers():
    batch = whole(open_frame({"a": torch.tensor([1.5, 2], dtype=torch.bfloat16)}))
    assert batch["a"].tolist() == [1.5, 2]


def test_any_iterable_of_dicts_becomes_record_batches_as_it_is_consumed():
    taken = []

    def rows():
        for i in range(10):
            taken.append(i)
            yield {"a": i} if i % 2 else {"a": i, "b": [i]}

    batches = record_batches(rows(), 4)
    first = next(batches)
    assert taken == [0, 1, 2, 3]
    assert first.to_pylist() == [{"a": i, "b": None if i % 2 else [i]} for i in range(4)]
    assert [batch.num_rows for batch in batches] == [4, 2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": 1}, {"a": "x"}], r"records 1 to 2, column 'a'"),
        ([{"a": 1}, {"a": 1, "c": 2}], r"record 1, column 'c': The record has a column that is not among: a"),
        ([{"a": 1}, 7], r"record 1: Expected a dict, but it is a int"),
    ],
)
def test_rows_that_do_not_fit_the_first_are_errors(rows, message):
    with pytest.raises(DataError, match=message):
        list(record_batches(rows, 1))


def test_a_schema_holds_from_the_first_row():
    schema = pa.schema([("a", pa.float32()), ("b", pa.list_(pa.int64()))])
    (batch,) = record_batches([{"a": 1}], 5, schema)
    assert batch.schema == schema
    with pytest.raises(ValueError, match="at least 1"):
        next(record_batches([], 0))


@pytest.mark.parametrize("type_", [pl.Categorical, pl.Enum(["a", "bc"])])
def test_categories_of_polars_are_strings(type_):
    def read(values, kind):
        return whole(open_frame(pl.DataFrame({"x": pl.Series(values, dtype=kind)})))["x"]

    for values in (["a", "bc", "a"], ["a", None, "bc"]):
        assert_same(Batch({"x": read(values, type_)}), Batch({"x": read(values, pl.String)}))
    lists = [["a", "bc"], None, ["a"]]
    assert read(lists, pl.List(type_)).to_lists() == read(lists, pl.List(pl.String)).to_lists()


LARGE = 2**63 + 1


@pytest.mark.parametrize(
    "data",
    [
        {"x": [LARGE, None, 5]},
        {"x": np.array([LARGE, None, 5], dtype=object)},
        {"x": [[LARGE], None, [5]]},
        pd.DataFrame({"x": [LARGE, None, 5], "y": [0.5, 1, 2]}, dtype=object),
        pd.DataFrame({"x": [[LARGE], None, [5]], "y": pd.array([1, None, 3], "Int64")}),
    ],
)
def test_python_integers_from_two_to_the_63_on_are_unsigned_ids(data):
    assert whole(open_frame(data))["x"].to_lists() == [[LARGE - 2**64], [], [5]]


@pytest.mark.parametrize("wrong", [2**64, -1, "a"])
def test_python_integers_that_are_no_64_bit_ids_are_an_error_that_names_the_column(wrong):
    for data in ({"x": [LARGE, wrong]}, pd.DataFrame({"x": [LARGE, wrong]}, dtype=object)):
        with pytest.raises(DataError, match=r"column 'x': .*64"):
            open_frame(data)
