"""Files of one data set that were written with different types."""

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc
from pyarrow import parquet as pq

import karvan as kv
from karvan.data.columns.kinds import widest
from karvan.data.errors import DataError
from karvan.ragged import OptionalRagged


def write(folder, *columns, kind="parquet"):
    for number, column in enumerate(columns):
        table = pa.table({"x": column, "n": pa.array([number] * len(column))})
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    return folder


def rows(entry):
    return entry.tolist() if isinstance(entry, torch.Tensor) else entry.to_lists()


TEXT = [[97], [98]]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array([1], pa.int32()), pa.array([1 << 40], pa.int64()), [1, 1 << 40]),
        (pa.array([1], pa.int64()), pa.array([2], pa.int8()), [1, 2]),
        (pa.array([1], pa.uint8()), pa.array([-2], pa.int16()), [1, -2]),
        (pa.array([(1 << 64) - 1], pa.uint64()), pa.array([5], pa.int64()), [-1, 5]),
        (pa.array([0.5], pa.float32()), pa.array([0.25], pa.float64()), [0.5, 0.25]),
        (pa.array(["a"]), pa.array(["b"], pa.large_string()), TEXT),
        (pa.array(["a"]), pa.array([b"b"]), TEXT),
        (pa.array(["a"]).dictionary_encode(), pa.array(["b"]), TEXT),
        (pa.array(["a"]), pa.array(["b"]).dictionary_encode(), TEXT),
        (pa.array([[1]], pa.list_(pa.int32())), pa.array([[2]], pa.large_list(pa.int64())), [[1], [2]]),
        (pa.array([[]], pa.list_(pa.null())), pa.array([[2]]), [[], [2]]),
        (pa.array([[2]]), pa.array([[]], pa.list_(pa.null())), [[2], []]),
        (
            pa.array([[(1, 1.0)]], pa.map_(pa.int32(), pa.float32())),
            pa.array([[(2, 2.0)]], pa.map_(pa.int64(), pa.float64())),
            [[1], [2]],
        ),
        (pa.array([1], pa.timestamp("s")), pa.array([2000], pa.timestamp("ns")), [1_000_000, 2]),
        (pa.array([1], pa.date32()), pa.array([86_400_000], pa.date64()), [1, 1]),
        (pa.array([1], pa.time32("s")), pa.array([2000], pa.time64("ns")), [1_000_000, 2]),
        (pa.array([1], pa.duration("s")), pa.array([2000], pa.duration("ns")), [1_000_000, 2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_types_that_hold_the_same_values_are_read_together(tmp_path, first, second, expected, kind):
    (batch,) = kv.data.read(write(tmp_path, first, second, kind=kind), 2)
    assert rows(batch["x"]) == expected
    assert batch["n"].tolist() == [0, 1]


@pytest.mark.parametrize("place", [0, 1])
def test_a_column_without_a_type_in_one_file_takes_that_of_the_others(tmp_path, place):
    columns = [pa.array([7, 8])]
    columns.insert(place, pa.nulls(2))
    (batch,) = kv.data.read(write(tmp_path, *columns), 4)
    assert isinstance(batch["x"], OptionalRagged)
    assert batch["x"].to_lists() == ([[], [], [7], [8]] if place == 0 else [[7], [8], [], []])


def test_a_column_without_a_type_in_any_file_is_nan_unless_declared(tmp_path):
    folder = write(tmp_path, pa.nulls(2), pa.nulls(1))
    (batch,) = kv.data.read(folder, 3)
    assert batch["x"].isnan().all()
    (batch,) = kv.data.read(folder, 3, columns=[kv.data.Fixed("x", default=4), "n"])
    assert batch["x"].tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([1]), pa.array([0.5])),
        (pa.array([1]), pa.array(["a"])),
        (pa.array([1]), pa.array([True])),
        (pa.array([[1]]), pa.array([1])),
        (pa.array([[1]]), pa.array([["a"]])),
        (pa.array([1], pa.timestamp("s")), pa.array([1], pa.timestamp("s", "UTC"))),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.array([[1]], pa.list_(pa.int64(), 1))),
    ],
    ids=str,
)
def test_a_mix_that_would_lose_something_is_an_error_that_names_both_files(tmp_path, first, second):
    with pytest.raises(DataError, match=r"1\.parquet, column 'x': Expected the type .*0\.parquet, but it is"):
        kv.data.read(write(tmp_path, first, second), 2)


def test_integers_that_pandas_has_made_floats_are_named_as_such(tmp_path):
    with pytest.raises(DataError, match=r"pandas turns integers into floats.*Int64"):
        kv.data.read(write(tmp_path, pa.array([1]), pa.array([1.0, None])), 2)


def test_damage_in_a_later_file_is_found_before_reading_begins(tmp_path):
    write(tmp_path, pa.array([1]), pa.array([2]))
    (tmp_path / "1.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"1\.parquet"):
        kv.data.read(tmp_path, 2)


NUMBERS = st.sampled_from(
    [pa.int8(), pa.int32(), pa.int64(), pa.uint16(), pa.uint64(), pa.float32(), pa.float64(), pa.null()]
)
TEXTS = st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int8(), pa.string())])
TYPES = st.recursive(
    NUMBERS | TEXTS, lambda inner: inner.map(pa.list_) | inner.map(pa.large_list), max_leaves=3
)


@given(TYPES, TYPES)
def test_widening_is_symmetric_and_both_types_can_be_cast_to_the_result(a, b):
    wide = widest(a, b)
    assert wide == widest(b, a)
    if wide is not None:
        assert widest(wide, a) == wide
        for type_ in (a, b):
            assert pa.nulls(2, type_).cast(wide, safe=False).null_count == 2


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_declared_dtype_settles_a_mix_of_integers_and_floats(tmp_path, kind, turned):
    columns = [pa.array([2**60 + 1, 2]), pa.array([3.0, None, float("nan")])]
    write(tmp_path, *(columns[::-1] if turned else columns), kind=kind)

    def read(column):
        (batch,) = kv.data.read(f"{tmp_path}/*.{kind}", 9, columns=[column])
        found = rows(batch["x"])
        return found[3:] + found[:3] if turned else found

    assert read(kv.data.Fixed("x", dtype=torch.int64)) == [[2**60 + 1], [2], [3], [], []]
    assert read(kv.data.Fixed("x", default=-1, dtype=torch.int64)) == [2**60 + 1, 2, 3, -1, -1]
    assert read(kv.data.Fixed("x", dtype=torch.float64))[:3] == [float(2**60), 2.0, 3.0]
    with pytest.raises(DataError, match=r"declare their type, Fixed\(…, dtype=torch.int64\)"):
        read("x")


def test_a_fraction_in_a_file_of_floats_beside_one_of_declared_integers_is_an_error(tmp_path):
    write(tmp_path, pa.array([1, 2]), pa.array([3.0, 0.5]))
    data = kv.data.read(tmp_path, 9, columns=[kv.data.Fixed("x", dtype=torch.int64)])
    with pytest.raises(DataError, match=r"1\.parquet, record 1, column 'x': Expected whole numbers.*0\.5"):
        list(data)
