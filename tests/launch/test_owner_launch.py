"""Two jobs and one folder: the second is refused, a killed one is replaced."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_programs import ForkedProgram
from processes import kill, parent_of

PROGRAM = """
import os, pathlib, time
from karvan.owner import own
notes = pathlib.Path({notes!r})
owner = own(os.environ["KARVAN_CHECKPOINTS"])
(notes / f"started-{{os.getpid()}}").write_text(os.environ["KARVAN_OWNER"])
while not (notes / "end").exists():
    time.sleep(0.02)
    owner.check()
"""
FILE = ".karvan-owner.json"
LIMIT = 60  # seconds


@pytest.fixture
def job(tmp_path):
    """The file of a job whose trainers wait for a note."""
    (tmp_path / "entry.py").write_text(PROGRAM.format(notes=str(tmp_path)))
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: owned\nentry: {tmp_path / 'entry.py'}\ncheckpoints: {tmp_path / 'run'}\n"
        "roles: {trainers: 2}\nmode: sync\n"
    )
    return path


@contextmanager
def launched(job, **environment):
    command = [sys.executable, "-m", "karvan", "launch", str(job)]
    environment = {**os.environ, **environment}
    process = ForkedProgram(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def wait_for(condition):
    until = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def master_of(job, jobs):
    """The process of a job's master, once it has said where it is."""
    path = jobs / "owned" / "master.json"
    wait_for(path.exists)
    return json.loads(path.read_text())["pid"]


def started(job):
    return [path.read_text() for path in job.parent.glob("started-*") if path.read_text()]


def test_a_second_launcher_is_refused_with_code_2_and_a_killed_one_is_replaced(job, tmp_path):
    with launched(job) as first:
        wait_for(lambda: len(started(job)) == 2)
        record = json.loads((job.parent / "run" / FILE).read_text())
        assert record["pid"] == master_of(job, Path(os.environ["KARVAN_JOBS"]))
        assert set(started(job)) == {record["id"]}
        # The same job, and one that does not know of it: of another user, or on another machine.
        refused = {
            "here": ({}, f"Job 'owned' runs already (process {record['pid']})"),
            "elsewhere": (
                {"KARVAN_JOBS": str(tmp_path / "jobs")},
                f"belongs to a run that is training: process {record['pid']} ",
            ),
        }
        for environment, said in refused.values():
            with launched(job, **environment) as second:
                output = second.communicate(timeout=LIMIT)[0]
                assert second.returncode == 2
            assert said in output
            assert "Traceback" not in output
            assert len(started(job)) == 2
        assert record["taken"] in output
        keeper = parent_of(record["pid"])
        for pid in (first.pid, keeper, record["pid"]):  # the machine dies, as far as the folder can tell
            kill(pid)  # the master ends with its keeper
        first.wait()
        with launched(job, KARVAN_JOBS=str(tmp_path / "jobs")) as third:
            wait_for(lambda: len(started(job)) == 4)
            (job.parent / "end").touch()
            output = third.communicate(timeout=LIMIT)[0]
        assert third.returncode == 0, output
        assert f"is taken over from process {record['pid']} " in output
    assert not (job.parent / "run" / FILE).exists()


def test_a_master_that_was_stopped_for_longer_than_its_lease_ends_its_job(job, tmp_path):
    with launched(job, KARVAN_LEASE_SECONDS="2") as first:
        wait_for(lambda: len(started(job)) == 2)
        stopped = master_of(job, Path(os.environ["KARVAN_JOBS"]))
        os.kill(stopped, signal.SIGSTOP)
        with launched(job, KARVAN_JOBS=str(tmp_path / "jobs")) as second:
            wait_for(lambda: len(started(job)) == 4)
            os.kill(stopped, signal.SIGCONT)
            output = first.communicate(timeout=LIMIT)[0]
            assert first.returncode == 2, output
            taker = master_of(job, tmp_path / "jobs")
            assert f"was taken over by process {taker} " in output
            (job.parent / "end").touch()
            output = second.communicate(timeout=LIMIT)[0]
            assert second.returncode == 0, output
