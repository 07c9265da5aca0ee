"""Launched elastic jobs whose disks, folders and processes fail in other ways than by death."""

import os
import signal
import time

import pytest
from elastic_launch import ElasticLaunch
from processes import kill_family
from small_disk import small_disk

pytestmark = pytest.mark.slow
ROLES = ("trainer", "parameter-server", "master")


def saved(job):
    """The names of its complete checkpoints, the newest last."""
    return sorted(path.parent.name for path in job.checkpoints.glob("step-*/manifest.json"))


def kill_all(job):
    """Kill everything at once, as a machine that loses power."""
    kill_family(job.process.pid)
    job.process.wait()
    assert not any(job.pids(role) for role in ROLES)


def test_a_damaged_newest_checkpoint_is_replaced_by_the_one_before(tmp_path):
    with ElasticLaunch(tmp_path) as job:
        job.wait(lambda: len(saved(job)) >= 3)
        kill_all(job)
        newest = saved(job)[-1]
        largest = max((job.checkpoints / newest).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(largest.stat().st_size // 2)
            file.write(b"damaged!")
        job.launch()
        text = job.finish()
    assert newest in text
    assert "amaged" in text


def test_a_launcher_that_is_killed_stops_its_job_and_the_next_continues(tmp_path):
    with ElasticLaunch(tmp_path) as job:
        job.wait_for_world(2)
        job.process.kill()
        job.process.wait()
        until = time.monotonic() + 60
        while any(job.pids(role) for role in ROLES):
            assert time.monotonic() < until
            time.sleep(0.05)
        job.launch()
        job.finish()


def test_a_trainer_that_stops_for_ever_is_replaced(tmp_path):
    with ElasticLaunch(tmp_path, records=2000) as job:
        job.wait_for_world(2)
        stopped = next(iter(job.worlds()))
        os.kill(stopped, signal.SIGSTOP)
        job.wait(lambda: stopped not in job.worlds())
        job.wait_for_world(2)
        job.finish()


def test_a_job_whose_machine_was_suspended_continues(tmp_path):
    with ElasticLaunch(tmp_path) as job:
        job.wait_for_world(2)
        pids = [pid for role in ROLES for pid in job.pids(role)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(20)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        job.finish()


def test_a_full_disk_is_waited_for_and_costs_no_trainer(tmp_path):
    with (
        small_disk(tmp_path / "disk", "8m") as disk,
        ElasticLaunch(tmp_path, checkpoints=disk.folder / "run") as job,
    ):
        job.wait(lambda: len(saved(job)) >= 2)
        disk.fill()
        job.wait(lambda: "work.db could not be written" in job.log.read_text())
        disk.empty()
        log = job.finish()
    assert "Traceback" not in log
    assert "restarted" not in log
    assert "Generation 1" not in log


def test_checkpoints_that_vanish_are_an_error(tmp_path):
    with ElasticLaunch(tmp_path, restarts="max_restarts: 1") as job:
        job.wait(lambda: len(saved(job)) >= 2)
        job.checkpoints.rename(tmp_path / "elsewhere")  # removing it would race with what the job writes
        assert job.process.wait(120) == 75
        text = job.log.read_text()
    assert "Traceback" not in text
    assert "expected the file system that this run started on" in text[text.rindex("\nerror: ") :]
