"""Which files a path means, against the standard library's glob."""

import glob
import os

import fsspec
import pyarrow as pa
import pytest
from pyarrow import fs
from pyarrow import parquet as pq

from karvan.data.errors import DataError
from karvan.data.formats.open_files import open_files
from karvan.data.formats.paths import find

NAMES = [
    "b.csv", "a.csv", "c.tsv", "day=1/x.csv", "day=2/x.csv", "day=2/deep/y.csv",
    "_SUCCESS", ".hidden.csv", "_temporary/z.csv", "day=1/_x.csv",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("a\n1\n")
    return tmp_path


def names(found, folder):
    return [os.path.relpath(path, folder) for path in found.paths]


def test_a_folder_is_read_recursively_in_sorted_order_without_hidden_files(folder):
    expected = ["a.csv", "b.csv", "c.tsv", "day=1/x.csv", "day=2/deep/y.csv", "day=2/x.csv"]
    assert names(find(folder), folder) == expected
    assert names(find(str(folder) + "/"), folder) == expected


def test_a_single_file_is_read_whatever_its_name(folder):
    assert names(find(folder / "b.csv"), folder) == ["b.csv"]
    assert names(find(folder / "_SUCCESS"), folder) == ["_SUCCESS"]


@pytest.mark.parametrize("pattern", ["*.csv", "[ab].csv", "day=*/x.csv", "*/*/y.csv", "**/*.csv", "?.tsv"])
def test_globs_match_as_the_standard_library_says(folder, pattern):
    expected = sorted(
        path
        for path in glob.glob(str(folder / pattern), recursive=True)
        if not os.path.relpath(path, folder).startswith(("_", ".")) and "/_" not in path[len(str(folder)) :]
    )
    assert list(find(folder / pattern).paths) == expected


def test_relative_paths_and_globs_work(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert find("*.csv").paths == ("a.csv", "b.csv")
    assert find("day=2").paths == ("day=2/deep/y.csv", "day=2/x.csv")
    assert find("./day=?/x.csv").paths == ("day=1/x.csv", "day=2/x.csv")


def test_several_paths_keep_their_order(folder):
    assert names(find([folder / "c.tsv", folder / "day=2"]), folder) == [
        "c.tsv", "day=2/deep/y.csv", "day=2/x.csv",
    ]  # fmt: skip


def test_a_file_that_a_glob_reaches_on_several_ways_is_read_once(folder):
    assert names(find(folder / "**" / "**" / "x.csv"), folder) == ["day=1/x.csv", "day=2/x.csv"]


def test_what_is_not_there_or_twice_is_an_error_that_names_it(folder):
    with pytest.raises(DataError, match=r"nothing\.csv: There is no such file"):
        find(folder / "nothing.csv")
    with pytest.raises(DataError, match=r"\*\.orc"):
        find(folder / "*.orc")
    with pytest.raises(DataError, match=r"a\.csv: The file is named twice"):
        find([folder / "*.csv", folder / "a.csv"])
    with pytest.raises(DataError, match="At least one path"):
        find([])
    with pytest.raises(DataError, match="nosuchscheme://x"):
        find("nosuchscheme://x/y.csv")


def test_urls_are_opened_by_pyarrow_or_fsspec(folder):
    data = pa.table({"a": [1, 2, 3]})
    memory = fsspec.filesystem("memory")
    memory.mkdirs("/clicks/deep", exist_ok=True)
    for name in ("/clicks/1.parquet", "/clicks/deep/2.parquet"):
        with memory.open(name, "wb") as file:
            pq.write_table(data, file)
    try:
        for paths, records in [
            ("memory://clicks", [3, 3]),
            ("memory://clicks/*.parquet", [3]),
            ("memory://clicks/deep/2.parquet", [3]),
        ]:
            assert [part.records for part in open_files(paths).parts()] == records
        assert len(find("clicks", filesystem=memory).paths) == 2
    finally:
        memory.rm("/clicks", recursive=True)
    assert len(find(f"file://{folder}/*.csv").paths) == 2
    assert find("a.csv", filesystem=fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())).paths
