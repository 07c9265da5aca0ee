"""Data that is away for a while: reading continues behind the last record, and damage is still an error."""

import errno
import logging
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flaky_files import FlakyFileSystem, io_error
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, feather

import karvan as kv
from karvan.data import retry
from karvan.data.errors import DataError
from karvan.data.formats.paths import find
from karvan.data.retry import FileOutages

ROWS = 400
FORMATS = ["parquet", "csv", "arrow", "orc", "tfrecord", "tfrecord.gz", "recordio"]


def write(folder, format, files=3, **options):
    for number, ids in enumerate(np.array_split(np.arange(ROWS), files)):
        table = pa.table({"id": ids, "label": (ids % 2).astype(np.float32)})
        path = str(folder / f"{number}.{format}")
        if format == "parquet":
            pq.write_table(table, path, row_group_size=20, **options)
        elif format == "csv":
            csv.write_csv(table, path)
        elif format.startswith(("tfrecord", "recordio")):
            make = kv.data.RecordIOWriter if format == "recordio" else kv.data.TFRecordWriter
            with make(path) as writer:
                writer.write_rows(table)
        elif format == "orc":
            from pyarrow import orc

            orc.write_table(table, path)
        else:
            feather.write_feather(table, path, chunksize=20)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return {format: write(tmp_path_factory.mktemp(format), format) for format in FORMATS}


@pytest.fixture(autouse=True, scope="module")
def _short_pauses():
    """Many small outages are tried here, and none needs time to end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry, "_FIRST_PAUSE", 0.001)
        patch.setattr(retry, "_LONGEST_PAUSE", 0.05)
        yield


def read(folder, system=None, **options):
    return kv.data.read(str(folder), 16, filesystem=system, **options)


def ids(batches):
    return [number for batch in batches for number in batch["id"].tolist()]


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("format", FORMATS)
@given(seed=st.integers(0, 1 << 20), shuffle=st.sampled_from([0, 50]), workers=st.integers(1, 3))
def test_files_of_a_store_that_fails_at_random_give_every_record_once(
    written, format, seed, shuffle, workers
):
    expected = ids(read(written[format], shuffle=shuffle, workers=workers))
    system = FlakyFileSystem(0.1, seed, (ConnectionResetError, TimeoutError, io_error))
    loader = read(written[format], system, shuffle=shuffle, workers=workers)
    assert ids(loader) == expected
    assert sorted(expected) == list(range(ROWS))


def test_a_store_that_comes_back_is_waited_for_with_one_warning(written, caplog):
    system = FlakyFileSystem()
    batches = iter(read(written["parquet"], system, workers=2))
    seen = ids([next(batches)])
    system.away = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    def come_back():
        until = time.monotonic() + 60
        while system.failures < 5:
            assert time.monotonic() < until
            time.sleep(0.01)
        system.away = None

    thread = threading.Thread(target=come_back)
    thread.start()
    seen += ids(batches)
    thread.join()
    assert seen == list(range(ROWS))
    first, last = warnings_of(caplog)
    assert "Connection refused" in first
    assert ".parquet" in first
    assert "Retrying for up to 60 seconds." in first
    assert "Data can be read again" in last


def test_a_store_that_stays_away_is_a_temporary_error_that_names_the_file(written):
    system = FlakyFileSystem()
    batches = iter(read(written["parquet"], system, retry_seconds=0.3))
    next(batches)
    system.away = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    with pytest.raises(DataError, match=r"\.parquet.*Connection refused") as caught:
        list(batches)
    assert caught.value.temporary


def test_a_store_that_is_away_when_reading_begins_is_tried_again(written):
    system = FlakyFileSystem()
    system.away = TimeoutError("no answer")
    threading.Timer(0.3, lambda: setattr(system, "away", None)).start()
    assert ids(read(written["parquet"], system)) == list(range(ROWS))
    system.away = TimeoutError("no answer")
    with pytest.raises(DataError, match="no answer") as caught:
        read(written["parquet"], system, retry_seconds=0)
    assert caught.value.temporary


def test_an_error_without_a_number_is_an_outage_if_the_store_does_not_answer(written):
    system = FlakyFileSystem()
    batches = iter(read(written["parquet"], system, retry_seconds=0.5))
    next(batches)
    system.away = OSError("the store says something odd")
    with pytest.raises(DataError, match="something odd") as caught:
        list(batches)
    assert caught.value.temporary
    assert system.failures > 4


@pytest.mark.parametrize("remote", [False, True])
def test_a_damaged_file_is_an_error_at_once(tmp_path, remote, caplog):
    write(tmp_path, "parquet", 1, compression="none", use_dictionary=False, write_page_checksum=True)
    path = tmp_path / "0.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    begun = time.monotonic()
    with pytest.raises(DataError) as caught:
        list(read(tmp_path, FlakyFileSystem() if remote else None, retry_seconds=600))
    assert not caught.value.temporary
    assert time.monotonic() < begun + 60
    if not remote:
        assert warnings_of(caplog) == []


def test_a_flipped_byte_of_a_page_is_seen_if_the_page_has_a_checksum(tmp_path):
    """And is not without one, which is why docs/data_storage.md tells how to write checksums."""
    for checksum in (False, True):
        folder = tmp_path / str(checksum)
        folder.mkdir()
        write(folder, "parquet", 1, compression="none", use_dictionary=False, write_page_checksum=checksum)
        path = folder / "0.parquet"
        data = bytearray(path.read_bytes())
        data[data.index(np.arange(20).tobytes()) + 8] ^= 2  # the second id of the first row group
        path.write_bytes(data)
    assert ids(read(tmp_path / "False"))[:3] == [0, 3, 2]
    with pytest.raises(DataError, match=r"CRC|checksum"):
        list(read(tmp_path / "True"))


def test_a_local_file_that_was_removed_is_an_error_at_once(tmp_path, caplog):
    loader = read(write(tmp_path, "parquet"), retry_seconds=600)
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(DataError, match=r"1\.parquet") as caught:
        list(loader)
    assert not caught.value.temporary
    assert warnings_of(caplog) == []


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path, caplog):
    with pytest.raises(DataError, match="There is no such file") as caught:
        read(tmp_path / "nowhere", retry_seconds=600)
    assert not caught.value.temporary
    assert warnings_of(caplog) == []


def run(*command):
    return subprocess.run([*map(os.fspath, command)], capture_output=True, text=True, check=False)


def test_a_file_that_is_there_again_when_its_error_is_examined_was_away(tmp_path):
    there, other = str(tmp_path / "there"), str(tmp_path / "other")
    Path(there).touch()
    outages = FileOutages(find(there))
    assert outages.is_outage(FileNotFoundError(2, f"Failed to open local file '{there}'"), there)
    assert not outages.is_outage(FileNotFoundError(2, f"Failed to open local file '{other}'"), there)
    Path(there).unlink()
    assert not outages.is_outage(FileNotFoundError(2, f"Failed to open local file '{there}'"), there)


def test_a_file_system_that_is_unmounted_for_a_moment_is_waited_for(tmp_path, caplog):
    (tmp_path / "there").mkdir()
    there, here = write(tmp_path / "there", "parquet", 8), tmp_path / "here"
    here.mkdir()
    disk = tmp_path / "disk"  # so that the mount is of another device
    disk.mkdir()
    if (mounted := run("mount", "-t", "tmpfs", "tmpfs", disk)).returncode:
        pytest.skip(f"cannot mount a disk here: {mounted.stderr.strip()}")
    try:
        for path in there.iterdir():
            (disk / path.name).write_bytes(path.read_bytes())
        assert not run("mount", "--bind", disk, here).returncode
        batches = iter(read(here, workers=1))
        seen = ids([next(batches)])
        assert not run("umount", "-l", here).returncode

        def mount_again():
            until = time.monotonic() + 60
            while not warnings_of(caplog):
                assert time.monotonic() < until
                time.sleep(0.01)
            assert not run("mount", "--bind", disk, here).returncode

        thread = threading.Thread(target=mount_again)
        thread.start()
        seen += ids(batches)
        thread.join()
        assert seen == list(range(ROWS))
    finally:
        run("umount", "-l", here)
        run("umount", "-l", disk)


class Numbers:
    """A source of one's own."""

    schema = pa.schema([("id", pa.int64())])

    def __init__(self, error, chance=0.3):
        self.error, self.chance = error, chance
        self.random = np.random.default_rng(0)

    def parts(self):
        return [kv.data.Part("numbers", ROWS)]

    def read(self, split):
        for first in range(split.first, split.first + split.count, 7):
            if self.random.random() < self.chance:
                raise self.error
            last = min(first + 7, split.first + split.count)
            yield pa.record_batch({"id": np.arange(first, last)})


def test_a_source_of_ones_own_is_tried_again_if_its_error_says_so():
    assert ids(kv.data.read(Numbers(ConnectionError("gone")), 16)) == list(range(ROWS))
    with pytest.raises(ValueError, match="a mistake"):
        list(kv.data.read(Numbers(ValueError("a mistake")), 16))


def test_closing_a_loader_ends_its_waiting(written):
    system = FlakyFileSystem()
    loader = read(written["parquet"], system, retry_seconds=600)
    batches = iter(loader)
    next(batches)
    threads = [each for each in threading.enumerate() if each.name == "karvan-data"]
    system.away = ConnectionResetError("gone")
    until = time.monotonic() + 60
    while not system.failures and time.monotonic() < until:
        time.sleep(0.01)
    loader.close()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan"), "60", True])
def test_a_number_of_seconds_that_makes_no_sense_is_an_error(written, seconds):
    with pytest.raises((TypeError, ValueError), match="retry_seconds"):
        read(written["parquet"], retry_seconds=seconds)
