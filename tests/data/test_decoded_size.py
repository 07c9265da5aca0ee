"""A small file does not fill the memory, whatever its reader is; and what compresses well is read."""

import sys
from contextlib import suppress

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from forked_programs import run_forked
from pyarrow import ipc, orc
from pyarrow import parquet as pq
from rows import read_all

from karvan.data.errors import DataError
from karvan.data.formats.open_files import open_files

MIB = 1 << 20
MOST = 64  # MiB that a group may become; the limit of all readers is larger


def words(size):
    return pa.table({"x": ["a" * MIB] * size})


def numbers(size):
    return pa.table({"x": np.zeros(size * MIB // 8, np.int64)})


def lists(size):
    values = numbers(size)["x"].chunk(0)
    return pa.table({"x": pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)})


def tags(size):
    return pa.table(
        {"x": pa.ListArray.from_arrays(pa.array([0, size], pa.int32()), words(size)["x"].chunk(0))}
    )


def dictionary(size):
    word = pa.array(["a" * size * MIB])
    return pa.table({"x": pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), word)})


READ = """
import sys
from karvan.data.formats import base
from karvan.data.formats.open_files import open_files
from karvan.data.source import Split
assert base.MOST == 256 << 20
base.MOST = int(sys.argv[2]) << 20
def peak():
    return int(next(line for line in open("/proc/self/status") if "VmHWM" in line).split()[1]) >> 10
before = peak()
try:
    source = open_files(sys.argv[1])
    for part in source.parts():
        records = sum(batch.num_rows for batch in source.read(Split(part.path, 0, part.records)))
    print(peak() - before, records)
except ValueError as error:
    print(peak() - before, error)
"""


def write(table, path, compression="zstd", **options):
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression=compression, write_statistics=False, **options)
    elif path.suffix == ".orc":
        orc.write_table(table, path, compression=compression)
    else:
        new = ipc.new_stream if path.suffix == ".arrows" else ipc.new_file
        with new(path, table.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table)


def memory_to_read(path, most=MOST):
    """The peak memory that reading a file takes, in MiB, and the number of records or the error."""
    ended = run_forked([sys.executable, "-c", READ, str(path), str(most)])
    assert ended.returncode == 0, ended.stderr
    used, result = ended.stdout.split(" ", 1)
    return int(used), result


@pytest.mark.parametrize(
    ("name", "table", "options", "most"),
    [
        ("lists.parquet", lists, {"compression": "snappy"}, MOST),
        ("page.parquet", words, {"use_dictionary": False, "data_page_size": 1 << 30}, MOST),
        ("tags.parquet", tags, {}, 256),
        ("numbers.arrow", numbers, {"compression": "lz4"}, MOST),
        ("words.arrows", words, {}, MOST),
        ("dictionary.arrow", dictionary, {}, MOST),
        ("dictionary.arrows", dictionary, {}, MOST),
        ("numbers.orc", numbers, {}, MOST),
    ],
)  # fmt: skip
def test_a_group_that_declares_too_much_is_an_error_before_it_is_decoded(
    tmp_path, name, table, options, most
):
    write(table(most + most // 4), tmp_path / name, **options)
    used, result = memory_to_read(tmp_path / name, most)
    assert "once decoded, since" in result
    assert "Write the file with fewer records" in result
    assert used < 0.4 * most


@pytest.mark.parametrize("table", [words, lists])
def test_texts_and_lists_of_orc_are_not_decoded_beyond_the_limit(tmp_path, table):
    write(table(MOST + MOST // 4), tmp_path / "a.orc")
    used, result = memory_to_read(tmp_path / "a.orc")
    assert "a.orc, stripe 0" in result
    assert used < 0.4 * MOST


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False, "data_page_size": MIB, "write_batch_size": 1}]
)
def test_long_strings_that_take_few_bytes_are_decoded_some_at_a_time(tmp_path, options):
    write(words(400), tmp_path / "a.parquet", **options)
    assert (tmp_path / "a.parquet").stat().st_size < MIB
    used, result = memory_to_read(tmp_path / "a.parquet", 256)
    assert int(result) == 400
    assert used < 300


def test_what_compresses_well_is_read(tmp_path):
    count = MIB // 2
    table = pa.table(
        {
            "zero": np.zeros(count, np.int64),
            "null": pa.nulls(count, pa.int64()),
            "constant": pa.array(["a constant"]).take(pa.array(np.zeros(count, np.int32))),
            "padded": pa.ListArray.from_arrays(
                pa.array(np.arange(count + 1, dtype=np.int32) * 4), pa.array(np.zeros(4 * count, np.int64))
            ),
        }
    )
    for name in ("a.parquet", "a.orc", "a.arrow", "a.arrows"):
        write(table, tmp_path / name)
        assert read_all(open_files(tmp_path / name)).equals(table), name


def test_a_single_long_word_of_a_dictionary_does_not_forbid_lists_of_short_ones(tmp_path):
    words = pa.array(["x", "y", "z" * MIB])
    chosen = np.arange(100_000, dtype=np.int32) % 2
    chosen[7] = 2
    table = pa.table(
        {"tags": pa.ListArray.from_arrays(pa.array([0, 50_000, 100_000], pa.int32()), words.take(chosen))}
    )
    write(table, tmp_path / "a.parquet")
    assert read_all(open_files(tmp_path / "a.parquet")).equals(table)


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "brotli", "lz4", "none"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_all_codecs_and_pages_are_read_from_other_file_systems(compression, version):
    system = fsspec.filesystem("memory")
    table = pa.table(
        {"n": range(5000), "word": [f"w{n % 70}" for n in range(5000)], "list": [[n, n] for n in range(5000)]}
    )
    with system.open("a.parquet", "wb") as file:
        pq.write_table(
            table, file, compression=compression, data_page_version=version, row_group_size=1200,
            data_page_size=500, write_page_checksum=True,
        )  # fmt: skip
    assert read_all(open_files("a.parquet", filesystem=system)).equals(table)


def test_the_head_of_a_page_that_cannot_be_read_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    write(pa.table({"x": ["a", "b"]}), path)
    content = bytearray(path.read_bytes())
    content[4] = 0x19  # a list, which no head has
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet, row group 0: The head of a page"):
        read_all(open_files(path))


def test_a_compressed_buffer_outside_of_its_file_is_an_error(tmp_path):
    path = tmp_path / "a.arrows"
    write(pa.table({"x": np.zeros(4096, np.int64)}), path)
    content = path.read_bytes()
    size = len(content)
    for at in range(0, size - 8, 8):
        path.write_bytes(content[:at] + (1 << 40).to_bytes(8, "little") + content[at + 8 :])
        with suppress(DataError):
            assert read_all(open_files(path)).num_rows in (0, 4096)
