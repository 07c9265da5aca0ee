"""The wall clocks of an elastic job's processes are set while it runs: nobody is late, or waits, for that."""

import os
import signal
import subprocess
import sys
import time

import pytest
from elastic_launch import ElasticLaunch
from wall_clock import WallClocks

DAY = 86400
SLOWLY = {"records": 1600, "pause": 0.2}
NAMES = ["master-0", "trainer-0", "trainer-1", "parameter-server-0", "parameter-server-1"]
PROGRAM = """
import sys, threading, time
for line in sys.stdin:
    begun = time.monotonic()
    threading.Event().wait(0.1)
    print(time.time(), time.monotonic() - begun, flush=True)
"""


def test_the_library_changes_the_time_of_day_and_nothing_else(tmp_path):
    clocks = WallClocks(tmp_path / "clocks", ["trainer-0"])
    environment = {**os.environ, **clocks.environment, "KARVAN_ROLE": "trainer"}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, **streams) as process:
        for offset in (0, DAY, -DAY):
            clocks.set(["trainer-0"], offset)
            process.stdin.write("\n")
            process.stdin.flush()
            read, waited = map(float, process.stdout.readline().split())
            assert abs(read - time.time() - offset) < 10
            assert 0.1 <= waited < 10
        process.stdin.close()


def go_on(job, steps):
    """Wait until all trainers have made so many more steps, in the processes that they have now."""
    processes = set(job.pids("trainer"))
    target = max((step for step, _ in job.worlds().values()), default=0) + steps
    job.wait(lambda: processes == {pid for pid, (step, _) in job.worlds().items() if step >= target}, 60)
    assert set(job.pids("trainer")) == processes


@pytest.mark.slow
def test_the_clocks_of_a_job_jump_and_its_loader_is_killed(tmp_path):
    clocks = WallClocks(tmp_path / "clocks", NAMES)
    options = {"records": 600, "epochs": 1, "servers": 1, "loaders": 1, "environment": clocks.environment}
    with ElasticLaunch(tmp_path, trainers="{replicas: 1}", **options) as job:
        job.wait_for_world(1)
        for offset in (DAY, -DAY, 0):
            clocks.set(NAMES, offset)
            go_on(job, 2)
        assert "restarted" not in job.log.read_text()
        os.kill(job.pids("loader")[0], signal.SIGKILL)
        text = job.finish()
    assert text.count("restarted") == text.count("loader-0 was killed by SIGKILL; it is restarted.") == 1
    assert "Generation 1 begins" not in text
    assert job.pids("loader") == []


@pytest.mark.slow
@pytest.mark.parametrize("names", [["master-0"], ["trainer-0"], ["parameter-server-0"], NAMES])
@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
def test_clocks_jump_by_a_day_forward_and_backward(tmp_path, mode, names):
    clocks = WallClocks(tmp_path / "clocks", NAMES)
    with ElasticLaunch(tmp_path, **SLOWLY, mode=mode, environment=clocks.environment) as job:
        job.wait_for_world(2)
        for offset in (DAY, -DAY, 3600, 0):
            clocks.set(names, offset)
            time.sleep(3.0)  # longer than any two heartbeats
            go_on(job, 5)
        assert "restarted" not in job.log.read_text()
        text = job.finish()
    assert "does not answer" not in text
    assert "Generation 1 begins" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
def test_trainers_and_masters_that_start_after_a_jump_find_each_other(tmp_path, mode):
    clocks = WallClocks(tmp_path / "clocks", NAMES)
    with ElasticLaunch(tmp_path, **SLOWLY, mode=mode, environment=clocks.environment) as job:
        job.wait_for_world(2)
        for offset, role in ((DAY, "trainer"), (-DAY, "master"), (DAY, "master"), (-DAY, "trainer")):
            clocks.set(["master-0", "trainer-1"], offset)
            os.kill(job.pids(role)[0], signal.SIGKILL)
            job.wait(lambda role=role: len(job.pids(role)) == (2 if role == "trainer" else 1))
            job.wait_for_world(2)
            go_on(job, 3)
        text = job.finish()
    assert "Generation 1 begins" not in text
