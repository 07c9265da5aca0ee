"""Folders such as day=1 as columns."""

import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from rows import read_all

from karvan.data.errors import DataError
from karvan.data.formats.open_files import open_files
from karvan.data.read import read


def write(root, folders, columns=("user",)):
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        ids = range(10 * number, 10 * number + 4)
        pq.write_table(pa.table(dict.fromkeys(columns, ids)), root / folder / "part.parquet")


@pytest.fixture
def clicks(tmp_path):
    root = tmp_path / "clicks"
    write(root, ["day=2026-01-01/hour=03", "day=2026-01-01/hour=21", "day=2026-01-02/hour=03"])
    return root


def test_folders_are_columns_of_their_files(clicks):
    got = read_all(open_files(clicks), step=3)
    assert got.schema.types == [pa.int64(), pa.string(), pa.int64()]
    assert got["day"].to_pylist() == ["2026-01-01"] * 8 + ["2026-01-02"] * 4
    assert got["hour"].to_pylist() == [3] * 4 + [21] * 4 + [3] * 4
    assert got["user"].to_pylist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("", ["day", "hour"]),
        ("/day=*/hour=03/*.parquet", ["day", "hour"]),
        ("/day=2026-01-01", ["hour"]),
        ("/day=2026-01-01/hour=*", ["hour"]),
        ("/day=2026-01-01/hour=03/*.parquet", []),
        ("/day=2026-01-01/hour=03/part.parquet", []),
    ],
)
def test_only_folders_that_were_found_count(clicks, inside, expected):
    assert open_files(f"{clicks}{inside}").schema.names == ["user", *expected]


def test_batches_positions_and_chosen_columns_hold_partitions(clicks):
    def hours(loader):
        return [(u, h) for batch in loader for u, h in zip(batch["user"], batch["hour"], strict=True)]

    whole = hours(read(clicks, 5, columns=["hour", "user"], shuffle=6, seed=3))
    assert sorted(whole) == [(10 * n + i, h) for n, h in enumerate((3, 21, 3)) for i in range(4)]
    begun = read(clicks, 5, columns=["hour", "user"], shuffle=6, seed=3)
    next(iter(begun))
    rest = read(clicks, 5, columns=["hour", "user"], shuffle=6, seed=3)
    rest.load_state_dict(begun.state_dict())
    assert sorted(hours(rest)) == sorted(whole[5:])
    assert list(next(iter(read(clicks, 12)))) == ["user", "day", "hour"]


def test_partitions_can_be_left_out(clicks):
    assert open_files(clicks, partitions=False).schema.names == ["user"]
    assert list(next(iter(read(clicks, 12, options={"partitions": False})))) == ["user"]


def test_files_that_do_not_agree_on_keys_have_no_partitions(tmp_path):
    write(tmp_path, ["day=1", "day=2/hour=1"])
    assert open_files(tmp_path).schema.names == ["user"]


@pytest.mark.parametrize("columns", [None, ["user", "day"]])
def test_a_column_of_the_file_with_the_name_of_a_folder_is_an_error(tmp_path, columns):
    write(tmp_path, ["day=1"], ["user", "day"])
    with pytest.raises(DataError, match=r"part\.parquet, column 'day': .*partitions=False"):
        open_files(tmp_path, columns=columns)
    assert read_all(open_files(tmp_path, partitions=False))["day"].to_pylist() == [0, 1, 2, 3]


def test_values_are_unquoted_missing_ones_null_and_large_numbers_strings(tmp_path):
    write(tmp_path, ["a=x%2Fy/b=__HIVE_DEFAULT_PARTITION__/c=1", f"a=z/b=7/c={1 << 70}"])
    got = read_all(open_files(tmp_path)).slice(3, 2).to_pydict()
    assert got == {"user": [3, 10], "a": ["x/y", "z"], "b": [None, 7], "c": ["1", str(1 << 70)]}


def test_columns_of_folders_alone_are_an_error(clicks):
    with pytest.raises(DataError, match="At least one column must be in the files"):
        open_files(clicks, columns=["hour"])
