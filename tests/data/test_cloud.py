"""Files on S3, which is a small server here, and file systems that cannot be opened."""

import os

import pytest
from cloud import serving
from rows import FORMATS, read_all, table, write

from karvan.data.errors import DataError
from karvan.data.formats import open_files
from karvan.data.paths import find
from karvan.data.read import read
from karvan.data.windows import Windows

ROWS = table(60)
KEYS = [
    "a.csv", "b.csv", "day=1/x.csv", "day=1/_SUCCESS", "day=2/deep/y.csv", "day=2/x.csv", "day=2/.z.csv",
    "day=3/hour=01/1.csv", "day=3/hour=02/1.csv", "_temporary/z.csv",
]  # fmt: skip


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s3")
    files = {f"rows.{kind}": write(ROWS, folder / f"rows.{kind}", 25).read_bytes() for kind in FORMATS}
    buckets = {"names": dict.fromkeys(KEYS, b"a\n1\n"), "files": files}
    settings = {
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with serving(buckets) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in (settings | {"AWS_ENDPOINT_URL": f"http://{address}"}).items():
            patch.setenv(name, value)
        yield address


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("names", ["a.csv", "b.csv", "day=1/x.csv", "day=2/deep/y.csv", "day=2/x.csv",
                   "day=3/hour=01/1.csv", "day=3/hour=02/1.csv"]),
        ("names/day=2", ["day=2/deep/y.csv", "day=2/x.csv"]),
        ("names/*.csv", ["a.csv", "b.csv"]),
        ("names/day=?/x.csv", ["day=1/x.csv", "day=2/x.csv"]),
        ("names/day=3/hour=*", ["day=3/hour=01/1.csv", "day=3/hour=02/1.csv"]),
        ("names/**/x.csv", ["day=1/x.csv", "day=2/x.csv"]),
        ("names/b.csv", ["b.csv"]),
    ],
)  # fmt: skip
def test_folders_and_globs_are_listed_in_sorted_order(s3, path, expected):
    assert [os.path.relpath(name, "names") for name in find(f"s3://{path}").paths] == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(s3, kind):
    path = f"s3://files/rows.{kind}"
    source = open_files(path, **({"schema": ROWS.schema} if kind in ("csv", "tsv") else {}))
    assert read_all(source, 17)["user"].to_pylist() == ROWS["user"].to_pylist()


def test_batches_come_from_a_url(s3):
    loader = read("s3://files/*.parquet", 16, shuffle=20, columns=["user", "history"])
    assert sum(batch.rows for batch in loader) == 60


def test_options_of_the_file_system_may_end_the_url(s3):
    asked = f"?region=here&scheme=http&endpoint_override={s3}"
    assert find(f"s3://names/b.csv{asked}").paths == ("names/b.csv",)
    assert len(find(f"s3://names/*.csv{asked}").paths) == 2


def test_windows_are_folders_on_s3_as_well(s3):
    windows = Windows("s3://names", "day=*", read=lambda folder: read(f"{folder}/*.csv", 8), poll=0.01)
    window = windows.next_window(timeout=0)
    assert window is not None
    assert window.name == "day=1"
    assert sum(batch.rows for batch in window.loader) == 1
    assert windows.next_window(timeout=0) is None  # the second one is not complete
    deep = Windows("s3://names/", "day=*/hour=*", read=lambda folder: read(folder, 8), complete=None)
    window = deep.next_window(timeout=0)
    assert window is not None
    assert window.name == "day=3/hour=01"


def test_a_missing_bucket_or_key_is_an_error_that_names_it(s3):
    for path in ("s3://nowhere/x.csv", "s3://names/nothing.csv", "s3://nowhere/*.csv", "s3://nowhere"):
        with pytest.raises(DataError, match=r"^" + path.replace("*", r"\*")):
            find(path)


def test_an_option_that_a_file_system_does_not_have_is_an_error_that_names_it():
    with pytest.raises(DataError, match=r"^s3://names/b.csv: The URL cannot be read:.*'bogus'"):
        find("s3://names/b.csv?bogus=1")


def test_a_file_system_that_cannot_be_opened_says_what_it_needs():
    with pytest.raises(DataError, match=r"^hdfs://name:8020/x: The file system.*needs Java and Hadoop"):
        find("hdfs://name:8020/x")
    with pytest.raises(DataError, match=r'^sftp://host/x: The file system.*"paramiko" to be installed'):
        find("sftp://host/x")
    with pytest.raises(DataError, match=r"^nosuch://x: The file system.*Protocol not known"):
        find("nosuch://x")
