"""TFRecord: what others write is read, what we write others read, and every flipped bit is noticed."""

import gzip
import io
import json
import struct
import zlib
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_reference import read_tfrecords, write_example, write_tfrecords
from rows import read_all
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.summary.writer.record_writer import RecordWriter as TensorBoardWriter

import karvan as kv
from karvan.data.errors import DataError
from karvan.data.formats import recordio, tfrecord
from karvan.data.formats.open_files import open_files, read_records
from karvan.data.formats.tfrecord import TFRecordWriter
from karvan.data.loading.rank_shares import merge
from karvan.native import _native

# Two records, b"" and b"abc", as TensorBoard's writer, which is not ours, writes them: u64 length, its masked
# CRC-32C, the data, its masked CRC-32C. 0xA282EAD8, the last word of the first, is the mask's constant alone:
# the CRC-32C of nothing is 0.
GOLDEN = bytes.fromhex(
    "0000000000000000 29039807 d8ea82a2  0300000000000000 b099490e 616263 6e57f121".replace(" ", "")
)
# {"id": [1, 300], "p": [0.5], "t": [b"ab"]}, by hand from the numbers of the fields in example.proto and
# feature.proto: Example.features 1, Features.feature 1, key 1 and value 2, lists 1 (bytes), 2, 3 (int64).
GOLDEN_EXAMPLE = bytes.fromhex(
    "0a2b"
    "0a0d 0a026964 1207 1a05 0a03 01ac02"
    "0a0d 0a0170 1208 1206 0a04 0000003f"
    "0a0b 0a0174 1206 0a04 0a02 6162".replace(" ", "")
)
RECORDS = st.lists(st.binary(max_size=40), min_size=1, max_size=30)
COMPRESSIONS = {"none": bytes, "gzip": gzip.compress, "zlib": zlib.compress}


def put(path, records, compression=None):
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tfrecord")


def test_golden_bytes_are_read_and_written(tmp_path):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(GOLDEN)
    assert list(read_records(path)) == [b"", b"abc"]
    assert put(tmp_path / "y.tfrecord", [b"", b"abc"]).read_bytes() == GOLDEN
    with TFRecordWriter(path) as writer:
        row = {"id": [1, 300], "p": [0.5], "t": [b"ab"]}
        writer.write_rows(
            pa.Table.from_pylist([row]).cast(
                pa.schema(
                    [
                        ("id", pa.list_(pa.int64())),
                        ("p", pa.list_(pa.float32())),
                        ("t", pa.list_(pa.binary())),
                    ]
                )
            )
        )
    assert list(read_records(path)) == [GOLDEN_EXAMPLE]
    assert read_all(open_files(path)).to_pylist() == [{"id": [1, 300], "p": 0.5, "t": b"ab"}]


@given(RECORDS, st.integers(1, 60), st.integers(1, 7), st.sampled_from(list(COMPRESSIONS)))
def test_records_of_the_reference_come_in_order_and_in_any_split(folder, records, run, step, compression):
    path = folder / "reference.tfrecord"
    path.write_bytes(COMPRESSIONS[compression](write_tfrecords(records)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "RUN", max(run, 12))
        source = open_files(path, content="bytes")
        assert source.parts()[0].records == len(records)
        assert read_all(source, step)["record"].to_pylist() == records


@given(RECORDS, st.integers(1, 60), st.sampled_from(list(COMPRESSIONS)))
def test_what_is_written_the_reference_reads(folder, records, run, compression):
    path = folder / "ours.tfrecord"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "RUN", run)
        put(path, records, compression)
    plain = {"none": bytes, "gzip": gzip.decompress, "zlib": zlib.decompress}[compression](path.read_bytes())
    assert read_tfrecords(plain) == records


def test_tensorboard_reads_ours_and_we_read_tensorboards(tmp_path):
    records = [bytes([i]) * i for i in range(200)]
    path = put(tmp_path / "x.tfrecord", records)
    reader = PyRecordReader_New(str(path))
    theirs = []
    for _ in records:
        reader.GetNext()
        theirs.append(reader.record())
    assert theirs == records
    written = io.BytesIO()
    writer = TensorBoardWriter(written)
    for record in records:
        writer.write(record)
    assert written.getvalue() == path.read_bytes()


def test_gzip_is_found_by_the_first_bytes_and_written_by_the_name(tmp_path):
    records = [b"abc", b"x" * 100_000]
    path = put(tmp_path / "x.tfrecord.gz", records)
    assert gzip.decompress(path.read_bytes()) == write_tfrecords(records)
    assert list(read_records(path)) == records
    path.rename(tmp_path / "y.tfrecords")
    assert list(read_records(tmp_path / "y.tfrecords")) == records
    joined = tmp_path / "z.tfrecord.gz"
    joined.write_bytes(gzip.compress(GOLDEN) + gzip.compress(GOLDEN))  # gzip files may be joined
    assert list(read_records(joined)) == [b"", b"abc"] * 2


@pytest.mark.parametrize(
    "name", ["x.tfrecord-00003-of-00010", "x.tfrecord-00003-of-00010.gz", "x.tfr", "plain"]
)
def test_names_of_shards_and_files_without_a_name_are_known(tmp_path, name):
    path = put(tmp_path / name, [b"abc"], "gzip" if name.endswith(".gz") else None)
    assert list(read_records(path)) == [b"abc"]


def test_every_flipped_byte_and_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "x.tfrecord"
    content = write_tfrecords([b"abc", b"", b"defg"])
    ends = {len(write_tfrecords([b"abc", b"", b"defg"][:count])) for count in range(4)}
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.tfrecord"):
            read_all(open_files(path, content="bytes"))
    for size in range(1, len(content)):
        path.write_bytes(content[:size])
        if size in ends:  # the format cannot say how many records there should be
            assert read_all(open_files(path, content="bytes")).num_rows < 3
            continue
        with pytest.raises(DataError, match=r"x\.tfrecord"):
            read_all(open_files(path, content="bytes"))


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (19 * 5 + 2, "record 5, byte 95: The length of the record does not match its checksum"),
        (19 * 5 + 13, "record 5, byte 95: The data of the record does not match its checksum"),
    ],
)
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_damage_names_file_record_and_byte(tmp_path, at, message, compression):
    content = bytearray(write_tfrecords([b"abc"] * 9))
    content[at] ^= 1
    path = tmp_path / "x.tfrecord"
    path.write_bytes(COMPRESSIONS[compression](bytes(content)))
    with pytest.raises(DataError, match=message.replace("byte 95", "byte 95.*")):
        read_all(open_files(path, content="bytes"))


def test_cut_off_files_name_the_record(tmp_path):
    path = tmp_path / "x.tfrecord"
    content = write_tfrecords([b"abc"] * 9)
    path.write_bytes(content[:-3])
    with pytest.raises(DataError, match=r"x\.tfrecord, record 8, byte 152: The record is cut off"):
        open_files(path).parts()
    path.write_bytes(gzip.compress(content)[:-12])
    with pytest.raises(DataError, match=r"x\.tfrecord: The compressed data is cut off"):
        open_files(path).parts()
    path.write_bytes(gzip.compress(content[:-3]))
    with pytest.raises(DataError, match=r"x\.tfrecord, record 8, byte 152 of the data before.*cut off"):
        open_files(path).parts()
    path.write_bytes(gzip.compress(content) + b"rest")
    with pytest.raises(DataError, match=r"x\.tfrecord: The compressed data is damaged"):
        open_files(path).parts()


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PAR1", "By its first bytes it is Parquet"),
        (b"\x04\x03\x02\x01", "By its first bytes it is RecordIO"),
        (b"id,label\n", "damaged, or of another format"),
    ],
)
def test_files_of_other_formats_are_errors_with_a_hint(tmp_path, start, message):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(start + bytes(100))
    with pytest.raises(DataError, match=rf"x\.tfrecord: .*{message}"):
        open_files(path).parts()


def test_a_compressed_file_without_records_is_a_part_of_none(tmp_path):
    path = put(tmp_path / "x.tfrecord.gz", [])
    assert [part.records for part in open_files(path, content="bytes").parts()] == [0]
    assert put(tmp_path / "y.tfrecord", []).read_bytes() == b""
    with pytest.raises(DataError, match="The file is empty"):
        open_files(tmp_path / "y.tfrecord").parts()


def test_a_writer_that_fails_leaves_no_file(tmp_path):
    path = tmp_path / "x.tfrecord"
    writer = TFRecordWriter(path)
    writer.write(b"abc")
    assert not path.exists()
    writer.__exit__(KeyError, KeyError(), None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="compression must be 'gzip', 'zlib' or 'none'"):
        TFRecordWriter(path, "snappy")


def test_options_that_contradict_each_other_are_errors(tmp_path):
    path = put(tmp_path / "x.tfrecord", [b"abc"])
    with pytest.raises(ValueError, match="content must be"):
        open_files(path, content="json")
    with pytest.raises(ValueError, match=r"schema is for tf\.Example"):
        open_files(path, content="bytes", schema={"a": "int64"})
    with pytest.raises(ValueError, match="decode is for content='bytes'"):
        open_files(path, content="example", decode=lambda records: None)


@given(
    st.sampled_from(["x.tfrecord", "x.tfrecord.gz", "x.recordio", "x.recordio.gz"]),
    st.sampled_from([0, 1, 40]),
    st.sampled_from([None, 7]),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), max_size=2),
)
def test_every_record_comes_exactly_once_whatever_the_stops_and_ranks(folder, name, shuffle, split, stops):
    """As `test_loader_exactly_once.py`, over files of records in runs of a few."""
    path = folder / name
    make = TFRecordWriter if "tfrecord" in name else kv.data.RecordIOWriter
    with make(path) as writer:
        for number in range(100):
            writer.write(write_example({"id": [number], "list": list(range(number % 4 + 1))}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "RUN", 500)
        patch.setattr(recordio, "RUN", 500)
        seen, position = Counter(), None
        for world, batches in [*stops, (2, 10**6)]:
            states = []
            for rank in range(world):
                loader = kv.data.read(
                    path, 6, shuffle=shuffle, split_records=split, epochs=2, rank=rank, world_size=world
                )
                if position is not None:
                    loader.load_state_dict(position)
                for _, batch in zip(range(batches), loader, strict=False):
                    seen.update(batch["id"].tolist())
                    assert batch["list"].to_lists() == [list(range(i % 4 + 1)) for i in batch["id"].tolist()]
                states.append(json.loads(json.dumps(loader.state_dict())))
            position = merge(states)
    assert seen == Counter(dict.fromkeys(range(100), 2))


def test_a_file_that_is_compressed_as_a_whole_has_records_of_up_to_64_mib(tmp_path):
    length = struct.pack("<Q", (64 << 20) + 1)
    head = length + struct.pack("<I", _native.masked_crc32c(length))
    (tmp_path / "x.tfrecord.gz").write_bytes(gzip.compress(head + bytes(65 << 20)))
    with pytest.raises(DataError, match=r"record 0.*at most 64 MiB"):
        list(read_records(tmp_path / "x.tfrecord.gz"))
    with pytest.raises(ValueError, match="at most 64 MiB"), TFRecordWriter(tmp_path / "y.tfrecord.gz") as out:
        out.write(bytes((64 << 20) + 1))
