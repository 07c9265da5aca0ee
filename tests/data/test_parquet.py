"""Parquet files of all kinds give the values that were written, and damage is never data."""

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as pq
from rows import read_all

import karvan as kv
from karvan.data.errors import DataError
from karvan.data.formats.open_files import open_files
from karvan.data.source import Split

TYPES = [pa.int32(), pa.int64(), pa.uint32(), pa.uint64(), pa.float32(), pa.float64()]


def assert_identical(ours, theirs):
    """The same bits, nulls and counts of them; NaNs are numbers like others here."""
    assert ours.type == theirs.type
    assert ours.null_count == theirs.null_count
    ours.validate(full=True)
    bits = pa.int64() if ours.type.bit_width == 64 else pa.int32()
    assert ours.view(bits).equals(theirs.view(bits))


@st.composite
def columns(draw, rows):
    """A column's type and values: few or many distinct ones, runs or none, nulls or none."""
    type_ = draw(st.sampled_from(TYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    distinct = draw(st.sampled_from([1, 2, 3, 100, 1 << 62]))
    values = rng.integers(0, distinct, rows, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    if draw(st.booleans()):
        values = np.repeat(values, rng.integers(1, 50, rows))[:rows]
    values = values.astype(f"u{type_.bit_width // 8}").view(type_.to_pandas_dtype())
    null_share = draw(st.sampled_from([0, 0, 0.01, 0.5, 1]))
    mask = rng.random(rows) < null_share
    if draw(st.booleans()):
        mask = np.sort(mask)
    nullable = bool(mask.any()) or draw(st.booleans())
    return pa.array(values, type_, mask=mask), nullable


@st.composite
def tables(draw):
    rows = draw(st.one_of(st.sampled_from([0, 1, 7, 8, 9]), st.integers(0, 3000)))
    made = [draw(columns(rows)) for _ in range(draw(st.integers(1, 4)))]
    fields = [pa.field(f"c{i}", array.type, nullable) for i, (array, nullable) in enumerate(made)]
    return pa.table([array for array, _ in made], schema=pa.schema(fields))


@given(data=st.data())
def test_numbers_of_all_kinds_are_read_as_they_were_written(tmp_path_factory, data):
    table = data.draw(tables())
    path = tmp_path_factory.mktemp("flat") / "rows.parquet"
    codec = data.draw(st.sampled_from(["snappy", "snappy", "none", "zstd", "gzip"]))
    pq.write_table(
        table,
        path,
        compression=codec,
        use_dictionary=data.draw(st.booleans()),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        data_page_size=data.draw(st.sampled_from([64, 1000, 1 << 20])),
        dictionary_pagesize_limit=data.draw(st.sampled_from([100, 1 << 20])),
        row_group_size=data.draw(st.sampled_from([100, 1 << 20])),
        write_page_checksum=data.draw(st.booleans()),
        write_batch_size=data.draw(st.sampled_from([10, 1024])),
        store_schema=data.draw(st.booleans()),
    )
    ours = read_all(open_files(path))
    assert ours.num_rows == table.num_rows
    for name in table.column_names:
        assert_identical(ours[name].combine_chunks(), table[name].combine_chunks())


def test_numbers_next_to_texts_and_lists_are_read_in_any_order_of_columns(tmp_path):
    rows = 700
    table = pa.table(
        {
            "text": [f"some words {i}" for i in range(rows)],
            "id": pa.array([None if i % 9 == 4 else i * i for i in range(rows)]),
            "list": [list(range(i % 4)) for i in range(rows)],
            "small": pa.array(range(rows), pa.int16()),
            "when": pa.array(range(rows), pa.timestamp("us")),
            "struct": [{"id": i} for i in range(rows)],
            "price": pa.array([i / 4 for i in range(rows)], pa.float32()),
        }
    )
    path = tmp_path / "mixed.parquet"
    pq.write_table(table, path, row_group_size=300)
    assert read_all(open_files(path)).equals(table)
    assert read_all(open_files(path, columns=["price", "list", "id"]), 250).equals(
        table.select(["price", "list", "id"])
    )


@pytest.mark.parametrize("encoding", ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"])
def test_other_encodings_are_read(tmp_path, encoding):
    table = pa.table({"other": list(range(500)), "plain": list(range(500))})
    path = tmp_path / "encoded.parquet"
    encodings = {"other": encoding, "plain": "PLAIN"}
    pq.write_table(table, path, use_dictionary=False, column_encoding=encodings)
    assert read_all(open_files(path)).equals(table)


def test_a_column_whose_name_has_a_dot_is_not_mistaken_for_a_field_of_a_struct(tmp_path):
    table = pa.table({"a": [{"b": 1}, {"b": 2}], "a.b": [3.0, 4.0]})
    path = tmp_path / "dots.parquet"
    pq.write_table(table, path)
    for columns in (["a"], ["a.b"], ["a.b", "a"]):
        assert read_all(open_files(path, columns=columns)).equals(table.select(columns))


@pytest.fixture(scope="module")
def small():
    return pa.table(
        {
            "id": pa.array([None if i % 7 == 3 else i % 11 for i in range(24)], pa.int64()),
            "price": pa.array([i / 8 for i in range(24)], pa.float32()),
        }
    )


def outcome(path, content):
    path.write_bytes(content)
    try:
        return read_all(open_files(path))
    except DataError:
        return None


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_every_flipped_byte_under_checksums_is_an_error_or_changes_nothing(
    tmp_path, small, compression, version
):
    path = tmp_path / "flipped.parquet"
    pq.write_table(small, path, compression=compression, data_page_version=version, write_page_checksum=True)
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    draw = random.Random(4)
    errors = 0
    for at in range(4, footer):
        changed = whole[at] ^ (1 << draw.randrange(8))
        made = outcome(path, whole[:at] + bytes([changed]) + whole[at + 1 :])
        errors += made is None
        assert made is None or made.equals(small), at
    assert errors > footer / 2


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_damage_without_checksums_never_changes_the_number_of_records(tmp_path, small, compression):
    path = tmp_path / "damaged.parquet"
    pq.write_table(small, path, row_group_size=20, compression=compression)
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    draw = random.Random(5)
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 2, 10])):
            content[draw.randrange(4, footer)] = draw.randrange(256)
        made = outcome(path, content)
        assert made is None or made.num_rows == small.num_rows


PLACES = pa.array(
    [
        {"city": {"id": 7, "name": "Köln"}, "lat": 50.9},
        {"city": None, "lat": 48.8},
        None,
        {"city": {"id": 9, "name": None}, "lat": None},
    ]
)


@pytest.mark.parametrize("kind", ["file", "table"])
def test_fields_of_a_struct_are_columns(tmp_path, kind):
    table = pa.table({"user": [1, 2, 3, 4], "place": PLACES})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    data = tmp_path / "a.parquet" if kind == "file" else table
    assert list(next(iter(kv.data.read(data, 4)))) == [
        "user",
        "place.city.id",
        "place.city.name",
        "place.lat",
    ]
    columns = ["place.lat", kv.data.Fixed("place.city.id", default=-1)]
    batch = next(iter(kv.data.read(data, 4, columns=columns)))
    assert batch["place.city.id"].tolist() == [7, -1, -1, 9]
    assert batch["place.lat"].isnan().tolist() == [False, False, True, True]


def test_structs_in_lists_are_to_be_written_as_lists_of_their_fields(tmp_path):
    visits = [[{"page": 1, "seconds": 2.5, "clicked": True}], None]
    pq.write_table(pa.table({"user": [1, 2], "visits": visits}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="Write its fields as columns of their own, or read only the other"):
        kv.data.read(tmp_path / "a.parquet", 2)
    assert next(iter(kv.data.read(tmp_path / "a.parquet", 2, columns=["user"])))["user"].tolist() == [1, 2]


def test_a_row_group_of_few_bytes_and_many_records_is_not_decoded_at_once(tmp_path):
    zeros = pa.table({"a": np.zeros(1 << 26, np.int8)})
    pq.write_table(zeros, tmp_path / "x.parquet", row_group_size=1 << 26)
    assert (tmp_path / "x.parquet").stat().st_size < 1 << 20
    source = open_files(tmp_path / "x.parquet")
    (part,) = source.parts()
    batch = next(iter(source.read(Split(part.path, 0, part.records))))
    assert batch.num_rows <= 131_072
