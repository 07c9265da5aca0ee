"""All file formats give the same rows, in splits of any kind, and say what is wrong with a file."""

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc
from pyarrow import parquet as pq
from rows import FORMATS, RECORDS, assert_same, options, read_all, schema_of, table, write

from karvan.data.columns.declarations import infer
from karvan.data.columns.decoder import Decoder
from karvan.data.errors import DataError
from karvan.data.formats import parquet
from karvan.data.formats.open_files import open_files
from karvan.data.source import Split

ROWS = table(523)
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    return {kind: write(ROWS, folder / f"rows.{kind}") for kind in FORMATS}


@pytest.fixture(scope="module")
def sources(files):
    return {kind: open_files(path, **options(path)) for kind, path in files.items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_same_rows_give_identical_batches_in_every_format(sources, kind):
    source = sources[kind]
    decode = Decoder(infer(schema_of(kind)))
    assert [part.records for part in source.parts()] == [523]
    records = read_all(source).combine_chunks().to_batches()[0]
    assert_same(decode(records), decode(ROWS.combine_chunks().to_batches()[0]))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("step", [1, 99, 100, 101, 300])
def test_splits_in_order_tile_a_file(sources, kind, step):
    users = read_all(sources[kind], step)["user"].to_pylist()
    assert users == ROWS["user"].to_pylist()


@given(data=st.data())
def test_any_split_gives_exactly_its_records(sources, data):
    kind = data.draw(st.sampled_from(FORMATS))
    source = sources[kind]
    first = data.draw(st.integers(0, 523))
    count = data.draw(st.integers(0, 523 - first))
    batches = list(source.read(Split(source.parts()[0].path, first, count)))
    got = pa.Table.from_batches(batches, source.schema)
    assert got["user"].to_pylist() == ROWS["user"].to_pylist()[first : first + count]
    assert all(batch.schema is source.schema or batch.schema == source.schema for batch in batches)


@pytest.mark.parametrize("kind", FORMATS)
def test_only_chosen_columns_are_read_and_in_the_chosen_order(files, kind):
    source = open_files(files[kind], columns=["history", "user"], **options(files[kind]))
    got = read_all(source, 200)
    assert got.schema.names == ["history", "user"]
    assert got["user"].to_pylist() == ROWS["user"].to_pylist()


@pytest.mark.parametrize(
    "kind", [kind for kind in FORMATS if kind not in RECORDS]
)  # these have no bytes then
def test_a_file_without_records_is_a_part_of_none(tmp_path, kind):
    path = write(ROWS.slice(0, 0), tmp_path / f"none.{kind}")
    source = open_files(path, **options(path))
    assert [part.records for part in source.parts()] == [0]
    assert list(source.read(Split(source.parts()[0].path, 0, 0))) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_an_empty_file_is_an_error_that_names_it(tmp_path, kind):
    path = tmp_path / f"empty.{kind}"
    path.touch()
    with pytest.raises(DataError, match=rf"empty\.{kind}: The file is empty"):
        open_files(path, **options(path)).parts()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_missing_column_is_an_error_that_names_file_and_column(files, kind):
    with pytest.raises(DataError, match=rf"rows\.{kind}, column 'nowhere': The column is missing.*user"):
        _ = open_files(files[kind], columns=["nowhere"], **options(files[kind])).schema


@pytest.mark.parametrize("kind", ["parquet", "orc", "arrow", "arrows", *RECORDS])
def test_a_column_of_another_type_than_in_the_first_file_is_an_error(tmp_path, kind):
    write(pa.table({"user": [1, 2]}), tmp_path / f"a.{kind}")
    write(pa.table({"user": ["x"]}), tmp_path / f"b.{kind}")
    with pytest.raises(
        DataError, match=rf"b\.{kind}, column 'user': Expected the type int64.*(string|binary)"
    ):
        open_files(tmp_path).parts()


@pytest.mark.parametrize("kind", ["parquet", "orc", "arrow", "arrows", *RECORDS])
@pytest.mark.parametrize("keep", [0.1, 0.6, 0.99])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, files, kind, keep):
    content = files[kind].read_bytes()
    path = tmp_path / f"cut.{kind}"
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(DataError, match=rf"cut\.{kind}"):
        read_all(open_files(path))


def test_a_stream_cut_between_record_batches_is_an_error(tmp_path):
    path = write(ROWS, tmp_path / "cut.arrows")
    whole = path.read_bytes()
    stream = pa.BufferReader(whole)
    reader = ipc.open_stream(stream)
    reader.read_next_batch()
    for content in (whole[: stream.tell()], whole[: stream.tell()] + END + whole[stream.tell() :]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cut\.arrows: The stream does not end with its end mark"):
            open_files(path).parts()


def test_damage_names_file_row_group_and_column(tmp_path):
    path = tmp_path / "damaged.parquet"
    data = pa.table({"a": list(range(1000)), "b": list(range(1000))})
    pq.write_table(data, path, row_group_size=500, write_page_checksum=True, compression="none")
    where = pq.read_metadata(path).row_group(1).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[where + 200] ^= 0xFF
    path.write_bytes(content)
    source = open_files(path)
    first, second = Split(str(path), 0, 500), Split(str(path), 500, 500)
    assert sum(batch.num_rows for batch in source.read(first)) == 500
    with pytest.raises(DataError, match=r"damaged\.parquet, row group 1, column 'b': .*"):
        list(source.read(second))


def test_splits_beyond_the_file_or_of_other_files_are_errors(sources, files):
    source = sources["parquet"]
    with pytest.raises(DataError, match="Records 500 to 600 were requested, but there are 523"):
        list(source.read(Split(str(files["parquet"]), 500, 100)))
    with pytest.raises(DataError, match="does not have"):
        list(source.read(Split("elsewhere", 0, 1)))


def test_small_splits_in_order_decode_each_group_once(tmp_path, monkeypatch):
    path = write(ROWS, tmp_path / "one.parquet", group=523)
    source = open_files(path)
    begun = []
    groups = type(source)._groups
    monkeypatch.setattr(
        type(source), "_groups", lambda self, *rest: (begun.append(rest[2]), groups(self, *rest))[1]
    )
    assert read_all(source, 10).num_rows == 523
    assert begun == [0]


def test_a_reader_of_every_other_split_decodes_each_group_once(tmp_path, monkeypatch):
    path = write(ROWS, tmp_path / "one.parquet", group=100)
    source = open_files(path)
    whole = pa.Table.from_batches(open_files(path).read(Split(str(path), 0, 523)))
    decoded = []
    groups = type(source)._groups

    def counted(self, *rest):
        for number, batch in groups(self, *rest):
            decoded.append(number)
            yield number, batch

    monkeypatch.setattr(type(source), "_groups", counted)
    for first in range(10, 523, 20):
        split = Split(str(path), first, min(10, 523 - first))
        assert pa.Table.from_batches(source.read(split)).equals(whole.slice(first, split.count))
    assert decoded == [0, 1, 2, 3, 4, 5]


def test_row_groups_too_large_to_decode_at_once_give_the_same_records(files, monkeypatch):
    monkeypatch.setattr(parquet, "_DECODED_AT_ONCE", 0)
    monkeypatch.setattr(parquet, "_ROWS", 30)
    got = read_all(open_files(files["parquet"]), 70)
    assert got["user"].to_pylist() == ROWS["user"].to_pylist()
    assert max(len(chunk) for chunk in got["user"].chunks) == 30


def test_a_reader_that_is_dropped_half_way_does_not_harm_the_next(sources, files):
    source, path = sources["parquet"], str(files["parquet"])
    reading = source.read(Split(path, 150, 300))
    next(reading)
    reading.close()
    for _ in range(2):
        got = pa.Table.from_batches(source.read(Split(path, 150, 300)))
        assert got["user"].to_pylist() == ROWS["user"].to_pylist()[150:450]


def test_the_format_is_found_by_the_first_bytes_where_the_name_is_silent(tmp_path, files):
    for kind in ("parquet", "orc", "arrow", "arrows", *RECORDS):
        path = tmp_path / f"part-{kind}"
        path.write_bytes(files[kind].read_bytes())
        assert read_all(open_files(path)).num_rows == 523
    with pytest.raises(DataError, match=r"part-orc: Expected ipc.*but this is orc"):
        open_files(tmp_path)
    unknown = tmp_path / "unknown"
    unknown.write_text("hello")
    with pytest.raises(DataError, match="pass format="):
        open_files(unknown)
    with pytest.raises(ValueError, match="there are: parquet, orc"):
        open_files(unknown, format="docx")


@pytest.mark.parametrize("kind", FORMATS)
def test_several_threads_read_one_source_at_once(files, kind):
    source = open_files(files[kind], **options(files[kind]))
    expected = ROWS["user"].to_pylist()
    path = str(files[kind])

    def check(first):
        got = pa.Table.from_batches(source.read(Split(path, first, 20)), source.schema)
        return got["user"].to_pylist() == expected[first : first + 20]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, [*range(0, 500, 20), *range(0, 500, 7)]))


@pytest.mark.parametrize("text", ['{"user": 1}\n{"user": 2}\n', ' [{"user": 1}]'])
def test_lines_of_json_are_an_error_that_says_how_to_read_them(tmp_path, text):
    path = tmp_path / "clicks.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"clicks\.jsonl.*JSON.*pyarrow\.json\.read_json"):
        open_files(path)
