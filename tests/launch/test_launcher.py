"""The launcher as a process: Ctrl-C, SIGTERM, kill -9."""

import os
import signal
import subprocess
import sys
from subprocess import PIPE

from launch_helpers import NEW, PATIENCE, Launched, wait_until
from processes import is_alive

ROLES = "roles: {trainers: 2, parameter_servers: 1, embedding_workers: 1, loaders: 1}"
COUNT = 5


def pids(job):
    return [each["pid"] for each in job.events("start")]


def interrupt(job, number=signal.SIGINT):
    os.kill(job.process.pid, number)


def test_ctrl_c_stops_trainers_first_then_the_others(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        interrupt(job)
        lines = job.output()
    assert job.process.returncode == 130
    asked = [each["name"] for each in job.events("asked")]
    assert sorted(asked[:2]) == ["trainer-0", "trainer-1"]
    assert asked[2:] == ["loader-0", "embedding-worker-0", "parameter-server-0"]
    assert not any(map(is_alive, pids(job)))
    assert "trainer-1 | trainer-1 was here" in lines


def test_sigterm_does_the_same_with_its_own_code(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        interrupt(job, signal.SIGTERM)
        job.output()
    assert job.process.returncode == 143
    assert len(job.events("asked")) == COUNT
    assert not any(map(is_alive, pids(job)))


def test_a_second_ctrl_c_kills_all(tmp_path):
    job = Launched(tmp_path, ROLES)
    with job:
        job.wait_for("start", "", COUNT)
        job.order("stubborn")
        interrupt(job)
        job.wait_for("asked", "trainer", 2)
        assert all(map(is_alive, pids(job)))
        interrupt(job)
        job.output()
    assert job.process.returncode == 130
    assert len(job.events("asked")) == 2  # nobody else was asked
    assert not any(map(is_alive, pids(job)))


def test_a_job_stops_in_order_when_its_launcher_is_killed(tmp_path):
    with Launched(tmp_path, ROLES, kind=NEW) as job:
        job.wait_for("start", "", COUNT)
        job.process.kill()
        job.process.wait()
        wait_until(job.ended)
    asked = [each["name"] for each in job.events("asked")]
    assert sorted(asked[:2]) == ["trainer-0", "trainer-1"]
    assert asked[2:] == ["loader-0", "embedding-worker-0", "parameter-server-0"]
    assert not any(map(is_alive, pids(job)))


def test_a_job_goes_on_when_nobody_reads_its_output(tmp_path):
    with Launched(tmp_path, f"{ROLES}\nlogs: {tmp_path}/logs") as job:
        job.wait_for("start", "", COUNT)
        job.process.stdout.close()
        job.kill("loader-0")
        job.wait_for("start", "loader-0", 2)
        job.order("end-trainer", 0)
        assert job.process.wait() == 0
    assert (tmp_path / "logs" / "loader-0.log").read_text() == "loader-0 was here\n" * 2
    assert "Started trainer-0" in (tmp_path / "logs" / "launcher.log").read_text()


def test_after_ctrl_c_the_command_says_what_was_saved_and_how_to_resume(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('runs', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "job.yaml").write_text(
        "{name: again, entry: train.py, roles: {trainers: 1}, checkpoints: run, grace: 1}"
    )
    saved = tmp_path / "run/step-000000000020"
    for step in (3, 20):
        (tmp_path / f"run/step-{step:012}").mkdir(parents=True)
    words = ["launch", "job.yaml", "--set", "max_restarts=7"]
    job = subprocess.Popen(
        [sys.executable, "-m", "karvan", *words], cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True
    )
    try:
        next(line for line in job.stdout if "runs" in line)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=PATIENCE)
    finally:
        job.kill()
    assert job.returncode == 130
    assert err.splitlines()[-2:] == [
        f"The job was stopped. Its newest checkpoint is {saved.relative_to(tmp_path)}.",
        "To resume: karvan launch job.yaml --set max_restarts=7",
    ]
