"""Which data sets are the same: today's files and yesterday's must never be taken for each other."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.data.identity import _spread


def write(path, rows, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    table = pa.table({"item": random.integers(0, 50, rows), "label": random.random(rows)})
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        pyarrow.parquet.write_table(table, path)


def identity(path, **options):
    return kv.data.read(str(path), 8, **options).identity()


@pytest.mark.parametrize("name", ["part-0.parquet", "part-0.csv"])
def test_files_of_equal_names_and_records_in_two_folders_are_two_data_sets(tmp_path, name):
    write(tmp_path / "15" / name, 100, seed=15)
    write(tmp_path / "16" / name, 100, seed=16)
    first, second = identity(tmp_path / "15"), identity(tmp_path / "16")
    assert first.id != second.id
    assert first.label == f"{tmp_path}/15/{name}, 100 records"


def test_data_that_moved_as_a_whole_is_the_same_and_partitions_are_not(tmp_path):
    write(tmp_path / "a" / "day=15" / "part-0.parquet", 100, seed=15)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.copytree(tmp_path / "a" / "day=15", tmp_path / "b" / "day=16")
    assert identity(tmp_path / "a" / "day=15").id == identity(tmp_path / "b" / "day=15").id
    assert identity(tmp_path / "b" / "day=15").id != identity(tmp_path / "b" / "day=16").id


def test_order_ranks_and_batches_do_not_change_the_identity(tmp_path):
    write(tmp_path / "day.parquet", 100, seed=1)
    plain = identity(tmp_path)
    assert identity(tmp_path, shuffle=20, seed=9, rank=1, world=3, drop_remainder=True) == plain


def test_files_that_two_data_sets_share_can_be_counted(tmp_path):
    for day in (15, 16):
        write(tmp_path / f"{day}.parquet", 10, seed=day)
    one, both = identity(tmp_path / "15.parquet"), identity(tmp_path)
    assert len(both.files) == 2
    assert set(one.files) < set(both.files)


def test_tables_in_memory_differ_by_their_rows():
    columns = {"item": np.arange(1000), "label": np.zeros(1000)}
    first = kv.data.read(columns, 8).identity()
    assert kv.data.read(pa.table(columns), 8).identity().id == first.id
    for place in (0, 500, 999):
        other = {**columns, "label": columns["label"].copy()}
        other["label"][place] = 1
        assert kv.data.read(other, 8).identity().id != first.id


def test_an_identity_survives_json():
    made = kv.data.read({"item": np.arange(5)}, 2).identity()
    assert type(made).from_state(made.state()) == made


def test_the_data_of_a_window_is_called_as_the_window(tmp_path):
    write(tmp_path / "day=15" / "a.parquet", 10, seed=1)
    (tmp_path / "day=15" / "_SUCCESS").touch()
    windows = kv.data.Windows(tmp_path, "day=*", read=lambda folder: kv.data.read(folder, 4))
    window = windows.next_window(0)
    assert window.loader.identity().name == "day=15"


def test_a_stream_is_the_data_it_takes():
    loader = kv.data.read({"item": np.arange(5)}, 2)
    assert kv.data.Stream(loader).identity() == loader.identity()
    assert kv.data.Stream([1, 2]).identity() is None


@given(count=st.integers(1, 400), most=st.integers(2, 40))
def test_the_files_that_are_looked_at_are_few_and_have_both_ends(count, most):
    chosen = list(_spread(count, most))
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, most)
    assert {0, count - 1} <= set(chosen)
