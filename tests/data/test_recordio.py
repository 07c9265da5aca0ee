"""RecordIO: what others write is read, what we write others read, and every flipped bit is noticed."""

import gzip
import json
import struct
import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_reference import (
    MAGIC,
    masked,
    read_recordio,
    read_snappy_frames,
    write_example,
    write_recordio,
    write_snappy_frames,
)
from rows import read_all

from karvan.data.errors import DataError
from karvan.data.formats import recordio
from karvan.data.formats.open_files import open_files, read_records
from karvan.data.formats.recordio import RecordIOWriter, frame, unframe
from karvan.data.source import Split

# One chunk of two records, b"abc" and b"", by hand from header.go and chunk.go of
# github.com/wangkuiyi/recordio: magic, CRC-32 (0x440A3370, by zlib) of the data, compressor 0, 11 bytes,
# 2 records; then lengths and records.
GOLDEN = bytes.fromhex(
    "04030201 70330a44 00000000 0b000000 02000000  03000000 616263 00000000".replace(" ", "")
)
COMPRESSIONS = ("none", "snappy", "gzip")
RECORDS = st.lists(st.binary(max_size=40) | st.sampled_from([b"a" * 90]), min_size=1, max_size=30)


def put(path, records, compression="snappy", **options):
    with RecordIOWriter(path, compression, **options) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recordio")


def test_golden_bytes_are_read_and_written(tmp_path):
    path = tmp_path / "x.recordio"
    path.write_bytes(GOLDEN)
    assert list(read_records(path)) == [b"abc", b""]
    assert put(tmp_path / "y.recordio", [b"abc", b""], "none").read_bytes() == GOLDEN


@given(
    st.lists(RECORDS, min_size=1, max_size=4),
    st.sampled_from([0, 1, 2]),
    st.integers(1, 300),
    st.integers(1, 7),
)
def test_chunks_of_the_reference_come_in_order_and_in_any_split(folder, chunks, compressor, run, step):
    path = folder / "reference.recordio"
    path.write_bytes(write_recordio(chunks, compressor))
    records = [record for chunk in chunks for record in chunk]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordio, "RUN", run)
        source = open_files(path, content="bytes")
        assert source.parts()[0].records == len(records)
        assert read_all(source, step)["record"].to_pylist() == records


@given(RECORDS, st.sampled_from(COMPRESSIONS), st.integers(1, 200))
def test_what_is_written_the_reference_reads(folder, records, compression, chunk_bytes):
    path = put(folder / "ours.recordio", records, compression, chunk_bytes=chunk_bytes)
    chunks = read_recordio(path.read_bytes())
    assert [record for chunk in chunks for record in chunk] == records
    assert all(len(chunk) == 1 or sum(map(len, chunk)) <= chunk_bytes for chunk in chunks)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_frames_of_snappy_are_those_of_the_reference(data, times):
    large = data * 400**times if times < 3 else data * 4000
    assert read_snappy_frames(frame(large[:200_000])) == large[:200_000]
    pieces = [large[at : at + 65536] for at in range(0, min(len(large), 200_000), 65536)]
    assert unframe(write_snappy_frames(pieces)) == b"".join(pieces)
    skipped = b"\xfe\x03\x00\x00abc"  # padding, which readers pass over
    assert unframe(write_snappy_frames(pieces) + skipped) == b"".join(pieces)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"abc", "does not begin"),
        (b"\xff\x06\0\0sNaPpY\x01\x09\0\0", "extends beyond"),
        (b"\xff\x06\0\0sNaPpY\x01\x02\0\0ab", "too short for its checksum"),
        (b"\xff\x06\0\0sNaPpY\x01\x07\0\0\0\0\0\0abc", "does not match its checksum"),
        (b"\xff\x06\0\0sNaPpY\x02\x03\0\0abc", "unknown type 2"),
        (b"\xff\x06\0\0sNaPpY\x00\x08\0\0" + struct.pack("<I", masked(b"")) + b"\xff\xff\x7f\0", "65,536"),
        (
            b"\xff\x06\0\0sNaPpY\x00\x07\0\0" + struct.pack("<I", masked(b"")) + b"\x05\xff\xff",
            "block of Snappy",
        ),
    ],
)
def test_damaged_frames_of_snappy_are_errors(stream, message):
    with pytest.raises(ValueError, match=message):
        unframe(stream)


def test_a_decoder_makes_columns_of_byte_records(tmp_path):
    rows = [{"user": i, "tags": [f"t{i}"]} for i in range(100)]
    path = put(tmp_path / "x.rio", [json.dumps(row).encode() for row in rows])
    source = open_files(
        path, decode=lambda records: pa.RecordBatch.from_pylist(list(map(json.loads, records)))
    )
    assert read_all(source, 33).to_pylist() == rows
    short = open_files(path, decode=lambda records: pa.record_batch({"a": [1]}))
    with pytest.raises(DataError, match=r"x\.rio, run 0.*decode returned 1 rows for 100 records"):
        read_all(short)


@pytest.mark.parametrize("compressor", [0, 1, 2])
def test_every_flipped_byte_and_every_truncation_is_noticed(tmp_path, compressor):
    path = tmp_path / "x.recordio"
    content = write_recordio([[b"abc", b""], [b"defg"]], compressor)
    first = len(write_recordio([[b"abc", b""]], compressor))
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.recordio"):
            read_all(open_files(path, content="bytes"))
    for size in range(1, len(content)):
        path.write_bytes(content[:size])
        if size == first:  # the format cannot say how many chunks there should be
            assert read_all(open_files(path, content="bytes")).num_rows == 2
            continue
        with pytest.raises(DataError, match=r"x\.recordio"):
            read_all(open_files(path, content="bytes"))


def chunk(data, compressor=0, size=None, count=1, magic=MAGIC, crc=None):
    crc = zlib.crc32(data) if crc is None else crc
    return struct.pack("<IIIII", magic, crc, compressor, len(data) if size is None else size, count) + data


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (chunk(b"\0\0\0\0", magic=7), "Expected a chunk, which begins with 04030201, but it is 07000000"),
        (chunk(b"\0\0\0\0", crc=1), "does not match its checksum"),
        (chunk(b"\0\0\0\0", compressor=3), "compressor must be 0, 1 or 2, but is 3"),
        (chunk(b"\0\0\0\0", size=9), "cut off"),
        (chunk(b"\0\0\0\0")[:11], "header of the chunk is cut off"),
        (chunk(bytes(8), count=1), "Expected 1 records that fill the chunk"),
        (chunk(b"\0\0\0\0", count=1 << 31), "cannot hold 2147483648 records"),
        (chunk(b"\x01\0\0\0"), "Expected 1 records that fill the chunk"),
        (
            chunk(b"\0\0\0\0", compressor=1),
            "cannot be decompressed: The data does not begin with the header of a Snappy stream",
        ),
        (chunk(b"\0\0\0\0", compressor=2), "cannot be decompressed: The compressed data is damaged"),
        # As PaddlePaddle's writer has it: count, checksum, compressor, size.
        (struct.pack("<IIIII", MAGIC, 1, 0x89ABCDEF, 0, 4) + bytes(4), "PaddlePaddle"),
    ],
)
@pytest.mark.parametrize("name", ["x.recordio", "x.recordio.gz"])
def test_damage_names_file_record_and_chunk(tmp_path, second, message, name):
    path = tmp_path / name
    content = write_recordio([[b"abc", b"d"]], 0) + second
    if name.endswith(".gz"):
        compressor = zlib.compressobj(wbits=31)
        content = compressor.compress(content) + compressor.flush()
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}, record 2, chunk at byte 32: .*{message}"):
        read_all(open_files(path, content="bytes"))


def test_a_file_that_is_compressed_as_a_whole_is_read(tmp_path):
    path = tmp_path / "x.recordio.gz"
    with RecordIOWriter(path, chunk_bytes=30) as writer:
        for number in range(50):
            writer.write(write_example({"id": [number]}))
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert read_all(open_files(path), 7)["id"].to_pylist() == list(range(50))


def test_writers_refuse_what_they_do_not_know(tmp_path):
    with pytest.raises(ValueError, match="compression must be 'snappy', 'gzip' or 'none'"):
        RecordIOWriter(tmp_path / "x.recordio", "zlib")
    with pytest.raises(ValueError, match="chunk_bytes must be from 1"):
        RecordIOWriter(tmp_path / "x.recordio", chunk_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_that_decompresses_to_much_more_than_it_stores_is_refused(tmp_path):
    size = 40 << 20
    bomb = gzip.compress(struct.pack("<I", size - 4) + bytes(size - 4))
    (tmp_path / "x.recordio").write_bytes(chunk(bomb, 2))
    with pytest.raises(DataError, match="at most 33,554,432 bytes of 4"):
        list(read_records(tmp_path / "x.recordio"))


def test_a_chunk_cannot_claim_more_records_than_its_bytes_hold(tmp_path):
    for stored, compressor, records in [
        (gzip.compress(b""), 2, 1 << 30),
        (gzip.compress(bytes(8 << 20)), 2, 2 << 20),  # each of no byte, and 16 bytes to say where it is
        (bytes(8), 0, 3),
    ]:
        (tmp_path / "x.recordio").write_bytes(chunk(stored, compressor, count=records))
        with pytest.raises(DataError, match=f"cannot hold {records} records"):
            list(read_records(tmp_path / "x.recordio"))


def test_chunks_that_store_little_are_not_decompressed_all_at_once(tmp_path):
    size = 8 << 20
    zeros = gzip.compress(struct.pack("<I", size - 4) + bytes(size - 4))
    (tmp_path / "x.recordio").write_bytes(20 * chunk(zeros, 2))
    source = open_files(tmp_path / "x.recordio", content="bytes")
    (part,) = source.parts()
    batches = [batch.nbytes for batch in source.read(Split(part.path, 0, part.records))]
    assert sum(batches) > 20 * (size - 4)
    assert max(batches) < 3 * size


def test_many_small_records_come_in_several_batches(tmp_path):
    stored = gzip.compress(bytes(4 * 300_000))
    (tmp_path / "x.recordio").write_bytes(chunk(stored, 2, count=300_000))
    source = open_files(tmp_path / "x.recordio", content="bytes")
    (part,) = source.parts()
    batches = [batch.num_rows for batch in source.read(Split(part.path, 0, part.records))]
    assert sum(batches) == 300_000
    assert max(batches) <= 1 << 16


def test_very_many_empty_records_are_read_as_they_were_written(tmp_path):
    with RecordIOWriter(tmp_path / "x.recordio", compression="gzip", chunk_bytes=8 << 20) as writer:
        for _ in range(1_049_000):
            writer.write(b"")
    assert sum(1 for _ in read_records(tmp_path / "x.recordio")) == 1_049_000


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_compresses_very_well_is_read_as_it_was_written(tmp_path, compression):
    records = [bytes(40 << 20), b"a"]
    assert list(read_records(put(tmp_path / "x.recordio", records, compression))) == records


def test_a_file_that_is_compressed_as_a_whole_has_records_of_up_to_64_mib(tmp_path):
    (tmp_path / "x.recordio.gz").write_bytes(gzip.compress(chunk(bytes(64 << 20), size=(64 << 20) + 1)))
    with pytest.raises(DataError, match="at most 64 MiB"):
        list(read_records(tmp_path / "x.recordio.gz"))
    with pytest.raises(ValueError, match="at most 64 MiB"):
        put(tmp_path / "y.recordio.gz", [bytes(64 << 20)], "none")
