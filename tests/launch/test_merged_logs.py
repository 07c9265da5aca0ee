"""Merged logs: whole lines with names."""

import io
import logging
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_helpers import wait_until
from small_disk import small_disk

from karvan.launch.engines.base import Process
from karvan.launch.engines.keeper import RoleLog
from karvan.launch.engines.local import FollowedLog, LocalEngine
from karvan.launch.merged_logs import MergedLogs

# Writes every line in two pieces, to both streams in turn.
TALKER = """
import os, sys
for number in range(300):
    os.write(1 + number % 2, b"%s begins" % sys.argv[1].encode())
    os.write(1 + number % 2, b" and ends %d\\n" % number)
os.write(1, b"without an end")
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_all(engine, *processes):
    ended = []
    for process in processes:
        engine.start(process, lambda process, code: ended.append(code))
    wait_until(lambda: len(ended) == len(processes))
    assert set(ended) == {0}


def talker(index):
    return Process("loader", index, (sys.executable, "-c", TALKER, f"loader-{index}"), {})


def test_lines_of_processes_are_never_mixed(tmp_path):
    stream = io.StringIO()
    logs = MergedLogs(folder=tmp_path / "logs", stream=stream)
    run_all(LocalEngine(logs.write, tmp_path / "run"), *map(talker, range(4)))
    logs.close()
    for index in range(4):
        name = f"loader-{index}"
        expected = [*(f"{name} begins and ends {number}" for number in range(300)), "without an end"]
        found = [line for line in stream.getvalue().splitlines() if line.startswith(f"{name} | ")]
        assert found == [f"{name} | {line}" for line in expected]
        assert (tmp_path / "logs" / f"{name}.log").read_text().splitlines() == expected
    assert len(stream.getvalue().splitlines()) == 4 * 301
    assert logs.tail("loader-3")[-1] == "without an end"


def test_lines_that_are_too_long_or_no_text_are_shown_as_well_as_can_be(tmp_path):
    stream = io.StringIO()
    program = "import os; os.write(1, b'x' * 70_000 + b'\\n\\xff\\n')"
    run_all(
        LocalEngine(MergedLogs(stream=stream).write, tmp_path),
        Process("loader", 0, (sys.executable, "-c", program), {}),
    )
    lines = [line.removeprefix("loader-0 | ") for line in stream.getvalue().splitlines()]
    assert "".join(lines[:-1]) == "x" * 70_000
    assert lines[-1] == "\N{REPLACEMENT CHARACTER}"


def test_on_a_terminal_every_process_has_its_colour(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    logs = MergedLogs(["loader-0", "trainer-10"], stream=stream)
    logs.write("loader-0", "[bold]as it is[/bold]")
    logs.write("trainer-10", "x")
    first, second = stream.getvalue().splitlines()
    assert "loader-0   │ " in first
    assert first.endswith("[bold]as it is[/bold]")
    assert "trainer-10 │ " in second
    assert first.split("loader")[0] != second.split("trainer")[0]


@pytest.mark.parametrize("line", ["", "a | b", "  indented"])
def test_a_line_stays_as_it_is(line):
    stream = io.StringIO()
    MergedLogs(stream=stream).write("trainer-0", line)
    assert stream.getvalue() == f"trainer-0 | {line}\n"


def test_a_folder_that_cannot_be_written_to_does_not_stop_the_lines(tmp_path):
    stream = io.StringIO()
    logs = MergedLogs(folder=tmp_path, stream=stream)
    (tmp_path / "trainer-0.log").mkdir()
    for line in "ab":
        logs.write("trainer-0", line)
    first, told, second = stream.getvalue().splitlines()
    assert (first, second) == ("trainer-0 | a", "trainer-0 | b")
    assert told.startswith(f"launcher | logs are no longer written to {tmp_path}")


def test_logs_of_a_job_rotate(tmp_path, monkeypatch):
    monkeypatch.setattr("karvan.launch.merged_logs.LOG_BYTES", 1000)
    logs = MergedLogs(folder=tmp_path, stream=io.StringIO())
    for number in range(1000):
        logs.write("trainer-0", f"line {number}")
    logs.close()
    files = [tmp_path / f"trainer-0.log{end}" for end in (".2", ".1", "")]
    assert set(tmp_path.iterdir()) == set(files)
    assert max(path.stat().st_size for path in files) <= 1000
    lines = "".join(path.read_text() for path in files).splitlines()
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) > 200


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.sampled_from(["", "read", "restart"]))))
def test_whoever_follows_a_log_that_rotates_gets_every_line_once(pieces):
    with tempfile.TemporaryDirectory() as folder:
        path, shown, lines = Path(folder, "a.log"), Path(folder, "shown"), []
        log = RoleLog(str(path), 100)
        FollowedLog.begin(path, shown)
        follower = FollowedLog(path, lines.append, shown)
        written, unread = b"", 0
        for number, (size, ends, then) in enumerate(pieces):
            data = bytes([97 + number % 26]) * size + b"\n" * ends
            written += data
            unread += len(data)
            log.write(data)
            if then or unread > 150:  # what waits is in the files that exist
                follower.read()
                unread = 0
            if then == "restart" and data.endswith(b"\n"):
                follower.close()
                follower = FollowedLog(path, lines.append, shown)
        follower.read(last=True)
        follower.close()
        log.close()
        assert lines == written.decode().splitlines()
        everything = []
        FollowedLog(path, everything.append).read(last=True)
        assert everything == lines[len(lines) - len(everything) :]
        last = []
        FollowedLog(path, last.append, tail=3).read(last=True)
        assert last[-3:] == everything[-3:]  # and one more if the last has no end


def test_characters_that_the_stream_does_not_have_are_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    MergedLogs(stream=stream).write("trainer-0", "café")
    assert stream.buffer.getvalue() == b"trainer-0 | caf?\n"


def test_a_full_disk_under_the_files_does_not_fail_a_job_that_is_done(tmp_path):
    with small_disk(tmp_path / "disk", "16k") as disk:
        stream = io.StringIO()
        logs = MergedLogs(["trainer-0"], disk.folder / "logs", stream)
        disk.fill()
        for _ in range(100):
            logs.write("trainer-0", "x" * 1000)
        logs.close()
    lines = stream.getvalue().splitlines()
    assert lines.count("trainer-0 | " + "x" * 1000) == 100  # the terminal has all of them
    (said,) = [line for line in lines if not line.startswith("trainer-0 | ")]
    assert said.startswith(f"launcher | logs are no longer written to {disk.folder / 'logs'}")
    assert said.endswith("No space left on device")


def test_warnings_of_the_launchers_own_parts_are_its_lines():
    stream = io.StringIO()
    logs = MergedLogs(stream=stream)
    log = logging.getLogger("karvan.wire")
    with logs.warnings():
        log.warning("Registry refused %s.", "10.0.0.7")
        log.info("Not for the log of a job.")
    log.warning("Nobody's line.")
    assert stream.getvalue() == "launcher | Registry refused 10.0.0.7.\n"
