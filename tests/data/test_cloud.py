"""Files on S3, Google's storage and HDFS, all of them small ones of ours, and what cannot be opened."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import cloud_hdfs
import pytest
from cloud import serving
from rows import FORMATS, read_all, table, write

from karvan.data.errors import DataError
from karvan.data.formats.open_files import open_files
from karvan.data.formats.paths import find, resolve
from karvan.data.read import read
from karvan.data.streams import Windows

ROWS = table(60)
KEYS = [
    "a.csv", "b.csv", "day=1/x.csv", "day=1/_SUCCESS", "day=2/deep/y.csv", "day=2/x.csv", "day=2/.z.csv",
    "day=3/hour=01/1.csv", "day=3/hour=02/1.csv", "_temporary/z.csv",
]  # fmt: skip


class Store(NamedTuple):
    """A file system: the URL of a path in it, the settings it needs, and options that may end the URL."""

    url: Callable[[str], str]
    settings: dict[str, str]
    options: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cloud")
    for key in KEYS:
        (folder / "names" / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / "names" / key).write_bytes(b"a\n1\n")
    (folder / "names" / "empty").mkdir()
    (folder / "files").mkdir()
    for kind in FORMATS:
        write(ROWS, folder / "files" / f"rows.{kind}", 25)
    return folder


@pytest.fixture(scope="module")
def s3(folder):
    with serving("s3", folder) as address:
        keys = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret"}
        settings = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": f"http://{address}"}
        options = f"?region=here&scheme=http&endpoint_override={address}"
        yield Store("s3://{}".format, keys | settings, options)


@pytest.fixture(scope="module")
def gs(folder):
    with serving("gs", folder) as address:
        settings = {"CLOUD_STORAGE_EMULATOR_ENDPOINT": f"http://{address}"}
        yield Store("gs://anonymous@{}".format, settings, f"?scheme=http&endpoint_override={address}")


@pytest.fixture(scope="module")
def hdfs(folder, tmp_path_factory):
    settings = cloud_hdfs.build(tmp_path_factory.mktemp("hdfs")) | {"FAKE_HDFS": str(folder)}
    return Store("hdfs://name:8020/{}".format, settings, "?user=somebody&replication=1")


@pytest.fixture(params=["s3", "gs", "hdfs"])
def store(request, monkeypatch):
    store = request.getfixturevalue(request.param)
    for name, value in store.settings.items():
        monkeypatch.setenv(name, value)
    return store


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("names", ["a.csv", "b.csv", "day=1/x.csv", "day=2/deep/y.csv", "day=2/x.csv",
                   "day=3/hour=01/1.csv", "day=3/hour=02/1.csv"]),
        ("names/day=2", ["day=2/deep/y.csv", "day=2/x.csv"]),
        ("names/*.csv", ["a.csv", "b.csv"]),
        ("names/day=?/x.csv", ["day=1/x.csv", "day=2/x.csv"]),
        ("names/day=3/hour=*", ["day=3/hour=01/1.csv", "day=3/hour=02/1.csv"]),
        ("names/*/*/1.csv", ["day=3/hour=01/1.csv", "day=3/hour=02/1.csv"]),
        ("names/**/x.csv", ["day=1/x.csv", "day=2/x.csv"]),
        ("names/b.csv", ["b.csv"]),
    ],
)  # fmt: skip
def test_folders_and_globs_are_listed_in_sorted_order(store, path, expected):
    assert [name.partition("names/")[2] for name in find(store.url(path)).paths] == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(store, kind):
    path = store.url(f"files/rows.{kind}")
    source = open_files(path, **({"schema": ROWS.schema} if kind in ("csv", "tsv") else {}))
    assert read_all(source, 17)["user"].to_pylist() == ROWS["user"].to_pylist()


def test_batches_come_from_a_url(store):
    loader = read(store.url("files/*.parquet"), 16, shuffle=20, columns=["user", "history"])
    assert sum(batch.samples for batch in loader) == 60


def test_windows_are_folders_of_any_file_system(store):
    windows = Windows(store.url("names"), "day=*", read=lambda folder: read(f"{folder}/*.csv", 8), poll=0.01)
    window = windows.next_window(timeout=0)
    assert window is not None
    assert window.name == "day=1"
    assert sum(batch.samples for batch in window.loader) == 1
    assert windows.next_window(timeout=0) is None  # the second one is not complete
    deep = Windows(store.url("names/"), "day=*/hour=*", read=lambda folder: read(folder, 8), complete=None)
    window = deep.next_window(timeout=0)
    assert window is not None
    assert window.name == "day=3/hour=01"


@pytest.mark.parametrize(
    "path", ["nowhere/x.csv", "names/nothing.csv", "nowhere/*.csv", "nowhere", "names/empty"]
)
def test_what_is_not_there_is_an_error_that_names_it(store, path):
    with pytest.raises(DataError, match=rf"^{re.escape(store.url(path))}: There is no such file"):
        find(store.url(path))


def test_options_of_the_file_system_may_end_the_url(store, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "CLOUD_STORAGE_EMULATOR_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert len(find(store.url("names/b.csv") + store.options).paths) == 1
    assert len(find(store.url("names/*.csv") + store.options).paths) == 2
    root = store.url("names") + store.options
    windows = Windows(root, "day=*", read=lambda folder: read(folder, 8, options={"partitions": False}))
    window = windows.next_window(timeout=0)
    assert window is not None
    assert sum(batch.samples for batch in window.loader) == 1


def test_a_server_that_cannot_be_reached_is_an_error_in_time_that_names_the_url():
    with socket.socket() as taken:  # it does not listen, so that connections to it are refused
        taken.bind(("127.0.0.1", 0))
        options = f"scheme=http&endpoint_override=127.0.0.1:{taken.getsockname()[1]}&retry_limit_seconds=1"
        url = f"gs://anonymous@names/a.csv?{options}"
        began = time.monotonic()
        with pytest.raises(DataError, match=rf"^{re.escape(url)}: UNAVAILABLE: .* connect to server$"):
            find(url)
        assert time.monotonic() - began < 25  # Google waits for half a minute otherwise


def test_googles_storage_is_tried_for_half_a_minute_unless_the_url_says_otherwise():
    for url, expected in {
        "gs://names/*.csv": 30,
        "gcs://anonymous@names/b.csv?scheme=http": 30,
        "gs://names/b.csv?retry_limit_seconds=5": 5,
    }.items():
        _, (options,) = resolve(url)[0].__reduce__()
        assert options["retry_time_limit"].total_seconds() == expected
        assert options["anonymous"] == ("anonymous" in url)


def test_an_option_that_a_file_system_does_not_have_is_an_error_that_names_it():
    for url in ("s3://names/b.csv", "gs://names/b.csv"):
        with pytest.raises(DataError, match=rf"^{url}: The URL cannot be read:.*'bogus'"):
            find(f"{url}?bogus=1")


def test_a_file_system_that_cannot_be_opened_says_what_it_needs():
    with pytest.raises(DataError, match=r'^sftp://host/x: The file system.*"paramiko" to be installed'):
        find("sftp://host/x")
    with pytest.raises(DataError, match=r"^nosuch://x: The file system.*Protocol not known"):
        find("nosuch://x")


def test_hdfs_that_cannot_be_reached_says_what_it_needs(hdfs, monkeypatch):
    for name, value in hdfs.settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        DataError, match=r"^hdfs://other:8020/x: .* connection failed\. It needs Java and Hadoop"
    ):
        find("hdfs://other:8020/x")


@pytest.mark.slow  # it starts a process, because pyarrow looks for the libraries only once in the life of one
def test_hdfs_without_hadoop_says_what_it_needs():
    command = [sys.executable, "-c", "from karvan.data.formats.paths import find; find('hdfs://name:8020/x')"]
    hidden = {"ARROW_LIBHDFS_DIR": "", "HADOOP_HOME": "", "JAVA_HOME": ""}
    done = subprocess.run(command, env=os.environ | hidden, stderr=subprocess.PIPE, text=True)
    assert re.search(r"DataError: hdfs://name:8020/x: The file system.*needs Java and Hadoop", done.stderr)
