"""ORC files whose damage crashes the ORC library, not the process; and the processes that see to it."""

import os
import signal
import sys
import textwrap
import threading
import time
from contextlib import suppress

import fsspec
import pyarrow as pa
import pytest
from forked_programs import run_forked
from processes import is_alive
from pyarrow import fs, orc
from rows import read_all

from karvan.data.errors import DataError
from karvan.data.formats import orc as orc_source
from karvan.data.formats.open_files import open_files

LISTS = pa.array([[1], [2, 3], [4, 5, 6], [7]] * 6, pa.list_(pa.int64()))
WORDS = pa.array(["a", "bb", "ccc", "dddd"] * 6)
MAPS = pa.array([[(1, 0.5)], [(2, 0.5), (3, 1.0)]] * 12, pa.map_(pa.int64(), pa.float32()))
NUMBERS = pa.array(range(24), pa.int64())


@pytest.fixture
def lists(tmp_path):
    path = tmp_path / "lists.orc"
    orc.write_table(pa.table({"user": NUMBERS, "history": LISTS, "words": WORDS}), path)
    return path


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def crashes(content):
    """Whether pyarrow alone does not survive a file."""
    script = (
        "import sys, pyarrow.orc as orc, pyarrow as pa\n"
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))\n"
        "file = orc.ORCFile(pa.BufferReader(bytes.fromhex(sys.stdin.read())))\n"
        "try: file.read_stripe(0)\n"
        "except Exception: pass"
    )
    return run_forked([sys.executable, "-c", script], content.hex()).returncode < 0


@pytest.mark.parametrize(("column", "at", "value"), [(LISTS, 69, 0xC0), (WORDS, 147, 2)])
def test_a_byte_that_ends_the_orc_library_is_an_error_that_says_where(tmp_path, column, at, value):
    path = tmp_path / "damaged.orc"
    orc.write_table(pa.table({"column": column, "other": NUMBERS.slice(0, len(column))}), path)
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"damaged\.orc, stripe 0, column 'column': .*crashes the ORC library"
    ):
        read_all(open_files(path))
    assert crashes(content)
    assert read_all(open_files(path, columns=["other"])).num_rows == len(column)


@pytest.mark.parametrize("column", [LISTS, WORDS, MAPS])
def test_a_byte_changed_in_a_stripe_is_an_error_or_all_records(tmp_path, column):
    path = tmp_path / "damaged.orc"
    orc.write_table(pa.table({"column": column}), path)
    content = path.read_bytes()
    for at in range(20, 140):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x81]) + content[at + 1 :])
        with suppress(DataError):
            assert read_all(open_files(path)).num_rows == 24


def test_a_decimal_of_too_many_digits_is_an_error(tmp_path):
    path = tmp_path / "decimal.orc"
    orc.write_table(pa.table({"price": pa.array([1, 2]).cast(pa.decimal128(37, 2))}), path)
    content = path.read_bytes()
    declared = content.rindex(b"\x28\x25\x30\x02")  # precision 37, scale 2
    path.write_bytes(content[: declared + 1] + b"\x38" + content[declared + 2 :])
    with pytest.raises(DataError, match=r"decimal\.orc: A decimal has 56 digits"):
        read_all(open_files(path))


def test_a_count_of_records_that_cannot_be_is_not_believed(tmp_path):
    path = tmp_path / "counts.orc"
    orc.write_table(pa.table({"a": pa.array([7] * 300)}), path)
    content = path.read_bytes()
    assert content.count(b"\xac\x02") >= 2  # 300
    path.write_bytes(content.replace(b"\xac\x02", b"\xff\x7f"))
    with pytest.raises(DataError, match=r"counts\.orc, stripe 0"):
        read_all(open_files(path))


def test_numbers_are_decoded_in_this_process_and_the_rest_beside_them(lists, monkeypatch):
    asked = []
    real = orc_source.decode_in_child
    monkeypatch.setattr(
        "karvan.data.formats.orc.decode_in_child", lambda *rest: asked.append(rest[-1]) or real(*rest)
    )
    assert read_all(open_files(lists, columns=["user"]))["user"].to_pylist() == NUMBERS.to_pylist()
    assert asked == []
    got = read_all(open_files(lists, columns=["words", "user", "history"]))
    assert asked == [["words", "history"]]
    expected = {"words": WORDS, "user": NUMBERS, "history": LISTS}
    assert got.to_pydict() == {name: column.to_pylist() for name, column in expected.items()}


@pytest.mark.parametrize("place", ["pyarrow", "fsspec"])
def test_files_of_any_file_system_are_decoded(lists, place):
    system = fs.SubTreeFileSystem(str(lists.parent), fs.LocalFileSystem())
    if place == "fsspec":
        system = fsspec.filesystem("memory")
        system.pipe("lists.orc", lists.read_bytes())
    got = read_all(open_files("lists.orc", filesystem=system))
    assert got["history"].to_pylist() == LISTS.to_pylist()


def test_a_killed_child_is_an_error_and_the_next_read_has_another(lists):
    while orc_source._idle:  # of other tests, and maybe about to end for want of work
        orc_source._idle.pop().close()
    source = open_files(lists)
    assert read_all(source).num_rows == 24
    while len(orc_source._idle) > 1:
        orc_source._idle.pop().close()
    child = orc_source._idle[0]._process
    os.kill(child.pid, signal.SIGSTOP)  # so that it is in the middle of things when it is killed
    found = []

    def read():
        try:
            read_all(open_files(lists))
        except DataError as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: not orc_source._idle)
    os.kill(child.pid, signal.SIGKILL)
    reader.join(60)
    assert "lists.orc, stripe 0: Decoding history, words crashes the ORC library (SIGKILL)" in str(found[0])
    assert child.returncode == -signal.SIGKILL
    assert read_all(source)["words"].to_pylist() == WORDS.to_pylist()


def test_a_child_without_work_ends_and_is_replaced(lists, monkeypatch):
    monkeypatch.setattr(orc_source, "_IDLE_SECONDS", 0.05)
    orc_source._close_all()
    source = open_files(lists)
    assert read_all(source).num_rows == 24
    child = orc_source._idle[0]._process
    wait_until(lambda: child.poll() is not None)
    assert child.returncode == 0
    assert read_all(source).num_rows == 24
    orc_source._close_all()


def test_children_end_with_the_process_that_started_them_even_if_it_is_killed(lists):
    script = textwrap.dedent(f"""
        import os, signal
        from karvan.data.formats import orc as orc_source
        from karvan.data.formats.open_files import open_files
        from karvan.data.source import Split
        source = open_files({str(lists)!r})
        read = lambda: sum(b.num_rows for b in source.read(Split({str(lists)!r}, 0, 24)))
        assert read() == 24
        own = orc_source._idle[0]._process.pid
        forked = os.fork()
        if not forked:
            os._exit(0 if read() == 24 and orc_source._idle[0]._process.pid != own else 1)
        assert os.waitpid(forked, 0)[1] == 0
        print(own, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = run_forked([sys.executable, "-c", script])
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: not is_alive(int(done.stdout)))
