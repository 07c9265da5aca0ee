"""Which data sets are the same: today's files and yesterday's must never be taken for each other."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

import karvan as kv
from karvan.data.identity import Budget, fingerprint_files, fingerprint_table, ranges_of, spread


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
    assert identity(tmp_path, shuffle=20, seed=9, rank=1, world_size=3, drop_remainder=True) == plain


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
    chosen = list(spread(count, most))
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, most)
    assert {0, count - 1} <= set(chosen)


def test_labels_that_were_corrected_in_the_middle_of_a_file_make_other_data(tmp_path):
    rows = ["user,label", *(f"{row:06d},{row % 2}" for row in range(20_000))]
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "day.csv").write_text("\n".join(rows))
        rows[9_000:11_000] = [f"{row[:-1]}{1 - int(row[-1])}" for row in rows[9_000:11_000]]
    sizes = {path.stat().st_size for path in tmp_path.glob("*/day.csv")}
    assert len(sizes) == 1
    assert identity(tmp_path / "before").id != identity(tmp_path / "after").id


LOCAL = fs.LocalFileSystem()


@given(data=st.data(), sizes=st.lists(st.integers(1, 3_000), min_size=1, max_size=4))
def test_one_changed_byte_anywhere_in_small_files_makes_another_fingerprint(data, sizes):
    budget = Budget(total=1 << 20, block=256, files=8)
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{number}" for number in range(len(sizes))]
        for path, size in zip(paths, sizes, strict=True):
            Path(path).write_bytes(bytes(size))
        before = fingerprint_files(LOCAL, paths, budget)
        assert fingerprint_files(LOCAL, paths, budget) == before
        number = data.draw(st.integers(0, len(sizes) - 1))
        content = bytearray(sizes[number])
        content[data.draw(st.integers(0, sizes[number] - 1))] ^= data.draw(st.integers(1, 255))
        Path(paths[number]).write_bytes(content)
        assert fingerprint_files(LOCAL, paths, budget) != before


@given(
    sizes=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=20),
    total=st.integers(1 << 16, 1 << 22),
    block=st.sampled_from([1 << 12, 1 << 14, 1 << 16]),
)
def test_the_ranges_that_are_read_are_spread_over_every_file_within_the_budget(sizes, total, block):
    ranges = ranges_of(sizes, Budget(total, block, 64))
    for size, found in zip(sizes, ranges, strict=True):
        ends = [start + length for start, length in found]
        assert found[0][0] == 0
        assert ends[-1] == size
        gaps = [start - end for (start, _), end in zip(found[1:], ends[:-1], strict=True)]
        assert min(gaps, default=0) >= 0
        assert max(gaps, default=0) - min(gaps, default=0) <= 1
        if sum(sizes) <= total:
            assert max(gaps, default=0) == 0
    read = sum(length for found in ranges for _, length in found)
    assert read <= total + len(sizes) * 2 * max(block, 1 << 12)


VALUES = {
    "int64": (pa.int64(), st.none() | st.integers(-5, 5)),
    "bool": (pa.bool_(), st.none() | st.booleans()),
    "text": (pa.string(), st.none() | st.text("ab", max_size=3)),
    "list": (pa.list_(pa.int32()), st.none() | st.lists(st.none() | st.integers(0, 3), max_size=3)),
    "fixed": (
        pa.list_(pa.float32(), 2),
        st.none() | st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2),
    ),
    "struct": (pa.struct({"id": pa.int64()}), st.none() | st.fixed_dictionaries({"id": st.integers(0, 3)})),
    "map": (pa.map_(pa.string(), pa.int64()), st.none() | st.just([("a", 1)]) | st.just([])),
}


@given(data=st.data(), kind=st.sampled_from(sorted(VALUES)))
def test_tables_have_one_fingerprint_if_and_only_if_their_values_are_equal(data, kind):
    dtype, values = VALUES[kind]
    first = data.draw(st.lists(values, max_size=6))
    second = data.draw(st.lists(values, max_size=6))

    def table(rows):
        """The rows in chunks that begin inside of larger arrays."""
        cut = data.draw(st.integers(0, len(rows)))
        pad = data.draw(st.lists(values, max_size=2))
        chunks = [
            pa.array(pad + piece + pad, dtype).slice(len(pad), len(piece))
            for piece in (rows[:cut], rows[cut:])
        ]
        return pa.table({"column": pa.chunked_array(chunks, dtype)})

    assert fingerprint_table(table(first)) == fingerprint_table(table(first))
    assert (fingerprint_table(table(first)) == fingerprint_table(table(second))) == (first == second)


@pytest.mark.parametrize("place", [0, 9_999])
def test_rows_at_both_ends_of_a_table_beyond_the_budget_count(place):
    values = np.zeros(10_000)
    before = fingerprint_table(pa.table({"label": values}), budget=1 << 14)
    values[place] = 1
    assert fingerprint_table(pa.table({"label": values}), budget=1 << 14) != before
