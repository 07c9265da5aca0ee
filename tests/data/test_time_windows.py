import json
import threading

import pytest
from loader_helpers import TableSource, decode, records_of

from karvan.data.errors import DataError
from karvan.data.loading.loader import Loader
from karvan.data.streams import Windows


class Root:
    """A root folder whose windows hold the records that a file in them counts."""

    def __init__(self, path):
        self.path = path

    def add(self, name, records, complete=True):
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "count").write_text(str(records))
        if complete:
            (folder / "_SUCCESS").touch()

    def end(self):
        (self.path / "_END").touch()

    def windows(self, pattern="*", rank=0, world=1, **settings):
        def read(folder):
            with open(f"{folder}/count") as file:
                source = TableSource([int(file.read())])
            return Loader(source, decode, 4, rank=rank, world_size=world, split_records=3)

        return Windows(str(self.path), pattern, read=read, poll=0.01, **settings)


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path)


def test_windows_come_in_the_order_of_their_names_until_the_end(root):
    for name, records in (("hour=02", 7), ("hour=01", 5), ("hour=03", 0)):
        root.add(name, records)
    (root.path / "README").touch()
    root.end()
    windows = root.windows()
    assert [(window.name, len(records_of(window.loader))) for window in windows] == [
        ("hour=01", 5),
        ("hour=02", 7),
        ("hour=03", 0),
    ]
    assert windows.ended
    assert windows.next_window() is None


def test_nested_partitions_are_windows_by_their_pattern(root):
    root.add("date=2026-01-31/hour=23", 2)
    root.add("date=2026-02-01/hour=00", 3)
    root.end()
    names = [window.name for window in root.windows("date=*/hour=*")]
    assert names == ["date=2026-01-31/hour=23", "date=2026-02-01/hour=00"]


def test_an_incomplete_window_holds_later_ones_back(root):
    root.add("a", 1, complete=False)
    root.add("b", 1)
    windows = root.windows()
    assert windows.next_window(timeout=0) is None
    assert not windows.ended
    root.add("a", 1)
    assert windows.next_window(timeout=0).name == "a"
    assert windows.next_window(timeout=0).name == "b"
    assert windows.next_window(timeout=0) is None
    assert not windows.ended


def test_an_end_marker_does_not_end_before_an_incomplete_window_is_read(root):
    root.add("a", 1, complete=False)
    root.end()
    windows = root.windows()
    assert windows.next_window(timeout=0) is None
    assert not windows.ended
    root.add("a", 1)
    assert [window.name for window in windows] == ["a"]


def test_without_completion_files_a_later_window_or_the_end_completes_one(root):
    root.add("a", 1, complete=False)
    windows = root.windows(complete=None)
    assert windows.next_window(timeout=0) is None
    root.add("b", 1, complete=False)
    assert windows.next_window(timeout=0).name == "a"
    assert windows.next_window(timeout=0) is None
    root.end()
    assert windows.next_window(timeout=0).name == "b"
    assert windows.next_window(timeout=0) is None
    assert windows.ended


def test_a_window_that_comes_too_late_is_not_read(root):
    root.add("b", 1)
    windows = root.windows()
    windows.next_window(timeout=0)
    root.add("a", 1)
    root.end()
    assert windows.next_window() is None


def test_waiting_ends_when_a_window_arrives_or_somebody_closes(root):
    windows = root.windows()
    got, arrived = [], threading.Event()

    def take():
        for window in windows:
            got.append(window.name)
            arrived.set()

    taker = threading.Thread(target=take)
    taker.start()
    root.add("a", 1)
    assert arrived.wait(60)
    windows.close()
    taker.join(timeout=60)
    assert got == ["a"]
    assert windows.ended


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1)])
def test_a_position_in_the_middle_of_a_window_resumes_there_with_any_number_of_ranks(root, before, after):
    root.add("a", 10)
    root.add("b", 30)
    root.add("c", 4)
    root.end()
    states, got = [], []
    for rank in range(before):
        windows = root.windows(rank=rank, world=before)
        windows.next_window()
        iterator = iter(windows.next_window().loader)
        got += records_of([next(iterator)])
        states.append(json.loads(json.dumps(windows.state_dict())))
    merged = Windows.merge(states)
    assert merged["window"] == "b"
    later = []
    for rank in range(after):
        windows = root.windows(rank=rank, world=after)
        windows.load_state_dict(merged)
        assert windows.state_dict() == merged
        for window in windows:
            (got if window.name == "b" else later).extend(records_of(window.loader))
    assert sorted(got) == list(range(30))
    assert sorted(later) == list(range(4))


def test_a_position_before_the_first_window_resumes_at_the_first(root):
    state = root.windows().state_dict()
    root.add("a", 3)
    windows = root.windows()
    windows.load_state_dict(Windows.merge([state, state]))
    assert windows.next_window(timeout=0).name == "a"


def test_a_root_that_cannot_be_listed_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    windows = Windows(tmp_path / "file", read=None)
    with pytest.raises(DataError, match=rf"^{tmp_path}/file: "):
        windows.next_window(timeout=0)


def test_ranks_in_different_windows_do_not_merge_and_a_missing_window_is_named(root):
    root.add("a", 3)
    root.add("b", 3)
    windows = root.windows()
    begin = windows.state_dict()
    windows.next_window()
    first = windows.state_dict()
    windows.next_window()
    with pytest.raises(ValueError, match=r"one window to merge their positions, but are in \['a', 'b'\]"):
        Windows.merge([first, windows.state_dict()])
    with pytest.raises(ValueError, match="All 2 ranks must have started window 'a'"):
        Windows.merge([first, {**begin, "window": "a"}])
    (root.path / "a" / "_SUCCESS").unlink()
    (root.path / "a" / "count").unlink()
    (root.path / "a").rmdir()
    other = root.windows()
    other.load_state_dict(first)
    with pytest.raises(FileNotFoundError, match="window 'a'"):
        other.next_window()
