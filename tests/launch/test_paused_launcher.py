"""A launcher or master that is stopped for a while, by SIGSTOP or Ctrl-Z: the job stays healthy."""

import os
import signal
import time

from launch_helpers import Launched, wait_until
from processes import is_alive, state_of

ROLES = "roles: {trainers: 2, parameter_servers: 1, loaders: 1}"
COUNT = 4


def log(folder):
    return (folder / "logs" / "launcher.log").read_text()


def test_a_master_that_was_stopped_gives_everybody_new_time(tmp_path):
    with Launched(tmp_path, f"roles: {{loaders: 1}}\nlogs: {tmp_path}/logs", args=["quick", "loader"]) as job:
        job.wait_for("beat", "loader-0", 3)
        os.kill(job.master(), signal.SIGSTOP)
        time.sleep(4)  # longer than a member may be silent
        os.kill(job.master(), signal.SIGCONT)
        wait_until(lambda: "was asleep for" in log(tmp_path))
        said = len(job.events("beat", "loader-0"))
        job.wait_for("beat", "loader-0", said + 3)  # time for a verdict
        assert is_alive(job.process.pid)
        job.order("end-trainer", 0)
        job.output()
    assert job.process.returncode == 0
    assert "does not answer" not in log(tmp_path)
    assert len(job.events("start", "loader")) == 1


def test_ctrl_z_stops_all_processes_and_continuing_continues_them(tmp_path):
    with Launched(tmp_path, f"{ROLES}\nlogs: {tmp_path}/logs") as job:
        started = job.wait_for("start", "", COUNT)
        everybody = [job.process.pid, job.master(), *(each["pid"] for each in started)]
        os.kill(job.process.pid, signal.SIGTSTP)
        wait_until(lambda: {state_of(pid) for pid in everybody} == {"T"}, "all to be stopped")
        assert "Suspended: all processes of the job are stopped" in log(tmp_path)
        os.kill(job.process.pid, signal.SIGCONT)
        wait_until(lambda: "T" not in {state_of(pid) for pid in everybody}, "all to continue")
        job.order("end-trainer", 0)
        assert "launcher | Resumed: all processes continue, and all timeouts start again." in job.output()
    assert job.process.returncode == 0
    assert len(job.events("start")) == COUNT


def test_a_job_that_is_suspended_while_it_stops_goes_on_stopping(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        job.order("stubborn")
        os.kill(job.process.pid, signal.SIGINT)
        asked = job.wait_for("asked", "trainer", 2)
        os.kill(job.process.pid, signal.SIGTSTP)
        wait_until(lambda: {state_of(each["pid"]) for each in asked} == {"T"}, "trainers to be stopped")
        wait_until(lambda: state_of(job.process.pid) == "T", "the launcher to be stopped")
        os.kill(job.process.pid, signal.SIGCONT)
        wait_until(lambda: "T" not in {state_of(each["pid"]) for each in asked}, "trainers to continue")
        os.kill(job.process.pid, signal.SIGINT)
        job.output()
    assert job.process.returncode == 130
    assert not any(is_alive(each["pid"]) for each in job.events("start"))


def test_a_suspended_job_ends_with_its_launcher(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        pids = [each["pid"] for each in job.wait_for("start", "", COUNT)]
        os.kill(job.process.pid, signal.SIGTSTP)
        wait_until(lambda: state_of(job.process.pid) == "T", "the launcher to be stopped")
        job.process.kill()
        job.process.wait()
        wait_until(job.ended)
    assert not any(map(is_alive, pids))
    assert len(job.events("asked")) == COUNT  # they were resumed, and stopped in order
