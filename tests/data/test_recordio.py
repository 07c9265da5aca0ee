"""RecordIO: what is written is read, and every flipped bit is noticed."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import read_all

from karvan.data.errors import DataError
from karvan.data.formats import recordio
from karvan.data.formats.open_files import open_files
from karvan.data.formats.recordio import RecordWriter, read_records


def put(path, records):
    with RecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 60), st.integers(1, 7))
def test_byte_records_come_back_in_order_and_in_any_split(tmp_path_factory, records, run, step):
    before, recordio._RUN = recordio._RUN, run
    try:
        path = put(tmp_path_factory.mktemp("rio") / "x.recordio", records)
    finally:
        recordio._RUN = before
    assert list(read_records(path)) == records
    source = open_files(path)
    assert source.parts()[0].records == len(records)
    assert read_all(source, step)["record"].to_pylist() == records


def test_a_decoder_makes_columns_of_byte_records(tmp_path):
    rows = [{"user": i, "tags": [f"t{i}"]} for i in range(100)]
    path = put(tmp_path / "x.rio", [json.dumps(row).encode() for row in rows])
    source = open_files(
        path, decode=lambda records: pa.RecordBatch.from_pylist(list(map(json.loads, records)))
    )
    assert read_all(source, 33).to_pylist() == rows
    short = open_files(path, decode=lambda records: pa.record_batch({"a": [1]}))
    with pytest.raises(DataError, match=r"x\.rio, run 0.*decode made 1 rows of 100 records"):
        read_all(short)


def test_every_flipped_byte_and_every_truncation_is_noticed(tmp_path):
    rows = pa.table({"a": [1, 2, 3], "s": ["x", None, "yz"]})
    bytes_file = put(tmp_path / "bytes.recordio", [b"abc", b"", b"defg"])
    rows_file = tmp_path / "rows.recordio"
    with RecordWriter(rows_file, rows.schema) as writer:
        writer.write_rows(rows)
    for path in (bytes_file, rows_file):
        content = path.read_bytes()
        for place in range(0, len(content), 1 if path is bytes_file else 7):
            damaged = bytearray(content)
            damaged[place] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=path.name):
                read_all(open_files(path))
        for size in range(1, len(content), 11):
            path.write_bytes(content[:size])
            with pytest.raises(DataError, match=path.name):
                read_all(open_files(path))


def test_a_file_whose_writer_failed_is_refused(tmp_path):
    path = tmp_path / "x.recordio"
    writer = RecordWriter(path)
    writer.write(b"abc")
    writer.__exit__(KeyError, KeyError(), None)
    with pytest.raises(DataError, match=r"x\.recordio: .*(truncated|too short)"):
        open_files(path).parts()


def test_writers_take_only_what_they_were_opened_for(tmp_path):
    table = pa.table({"a": [1]})
    with RecordWriter(tmp_path / "b.recordio") as writer, pytest.raises(ValueError, match="takes bytes"):
        writer.write_rows(table)
    with RecordWriter(tmp_path / "r.recordio", table.schema) as writer:
        with pytest.raises(ValueError, match="takes rows"):
            writer.write(b"x")
        with pytest.raises(ValueError, match="Expected rows with the schema"):
            writer.write_rows(pa.table({"a": ["x"]}))
    with pytest.raises(DataError, match="nothing to decode"):
        open_files(tmp_path / "r.recordio", decode=lambda _: None).parts()
