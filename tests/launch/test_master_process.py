"""The master of a launched job: it is killed and continues where it was, and so is everybody around it."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from free_ports import free_port
from launch_helpers import NEW, Launched, keepers_in, wait_until
from processes import is_alive, kill, parent_of

from karvan.cli.main import main
from karvan.launch.run_folder import RunFolder

ROLES = "roles: {trainers: 2, parameter_servers: 1, loaders: 1}"
COUNT = 4
LEFT = ["job.json", "lock", "logs", "outcome.json"]  # after a job, with an empty folder of processes perhaps


def kill_master(job):
    """Kill the master, and wait for the next one; its process."""
    before = job.master()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: job.master() != before, "another master")
    return job.master()


def said(job, text):
    log = job.run_folder / "logs" / "master-0.log"
    return [line for line in log.read_text().splitlines() if text in line]


def left(job):
    """The files of the job that are left, besides its empty folder of processes."""
    found = sorted(path.name for path in job.run_folder.iterdir())
    if "processes" in found:
        assert list((job.run_folder / "processes").glob("*")) == []
        found.remove("processes")
    return found


def test_a_killed_master_continues_with_the_same_processes_and_at_the_same_address(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        started = job.wait_for("start", "", COUNT)
        address = json.loads((job.run_folder / "master.json").read_text())["address"]
        for times in (1, 2):
            kill_master(job)
            text = "The master was restarted: generation 0, 4 processes."
            wait_until(lambda text=text, times=times: len(said(job, text)) == times)
        assert json.loads((job.run_folder / "master.json").read_text())["address"] == address
        assert all(is_alive(each["pid"]) for each in started)
        job.order("end-trainer", 0)
        lines = job.output()
    assert job.process.returncode == 0
    assert len(job.events("start")) == COUNT
    assert lines.count("trainer-0 | trainer-0 was here") >= 1
    assert len(job.events("asked")) == 2  # it still stops the others in order
    assert left(job) == LEFT


def test_a_master_that_is_at_another_address_tells_everybody(tmp_path):
    """As on another machine: the variables of processes have the address of the one before."""
    ports = ROLES.replace("loaders: 1", f"loaders: {{replicas: 1, port: {free_port()}}}")
    with Launched(tmp_path, ports) as job:
        started = job.wait_for("start", "", COUNT)
        before = job.master()
        path = job.run_folder / "master.json"
        files = [Path(each["env"]["KARVAN_MASTER_ADDRESS_FILE"]) for each in started]
        first = json.loads(path.read_text())["address"]
        assert [each["env"]["KARVAN_REGISTRY"] for each in started] == [first] * COUNT
        assert [file.read_text() for file in files] == [f"{first}\n"] * COUNT
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        path.write_text(json.dumps({"address": "127.0.0.2:1", "pid": before}))
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: said(job, "The master was restarted: generation 0, 4 processes."))
        second = json.loads(path.read_text())["address"]
        assert second not in (first, "127.0.0.2:1")
        assert [file.read_text() for file in files] == [f"{second}\n"] * COUNT
        assert all(is_alive(each["pid"]) for each in started)
        job.order("end-trainer", 0)
        job.output()
    assert job.process.returncode == 0
    assert len(job.events("start")) == COUNT
    assert left(job) == LEFT


def test_what_happens_while_the_master_is_away_is_not_missed(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        started = {each["name"]: each["pid"] for each in job.wait_for("start", "", COUNT)}
        master = job.master()
        keeper = parent_of(master)
        os.kill(keeper, signal.SIGSTOP)  # so that it does not restart the master yet
        os.kill(master, signal.SIGKILL)
        wait_until(lambda: not is_alive(master))
        os.kill(started["loader-0"], signal.SIGKILL)
        job.order("once")
        job.order("end-parameter-server", 75)
        wait_until(lambda: not is_alive(started["parameter-server-0"]))
        os.kill(keeper, signal.SIGCONT)
        again = job.wait_for("start", "parameter-server", 2)[-1]
        job.wait_for("start", "loader", 2)
        job.wait_for("start", "trainer", 4)
        os.remove(tmp_path / "once")
        assert again["env"]["KARVAN_GENERATION"] == "1"
        kill_master(job)
        wait_until(lambda: said(job, "The master was restarted: generation 1, 4 processes."))
        job.order("end-trainer", 0)
        lines = job.output()
    assert job.process.returncode == 0
    assert "launcher | loader-0 was killed by SIGKILL; it is restarted." in lines
    assert any("parameter-server-0 ended with code 75" in line for line in lines)


def test_a_process_that_stops_before_it_finds_the_next_master_is_replaced(tmp_path):
    with Launched(tmp_path, "roles: {trainers: 1}", args=["quick", "trainer"]) as job:
        job.wait_for("beat", "trainer", 20)  # two checks of health and more
        [trainer] = job.events("start", "trainer")
        before = job.master()
        os.kill(before, signal.SIGKILL)
        killed, until = False, time.monotonic() + 60.0
        while not killed:  # the next master continues what was stopped
            for _ in range(20):
                kill(trainer["pid"], signal.SIGSTOP)
                time.sleep(0.001)
            killed = said(job, "trainer-0 does not answer any more; it is killed.")
            assert time.monotonic() < until
        job.wait_for("start", "trainer", 2)
        assert said(job, "The master was restarted: generation 0, 2 processes.")
        job.order("end-trainer", 0)
        job.output()
    assert job.process.returncode == 0


def test_a_failure_that_the_master_did_not_see_ends_the_job_as_always(tmp_path):
    with Launched(tmp_path, "roles: {trainers: 1}", stderr=subprocess.PIPE) as job:
        [trainer] = job.wait_for("start", "trainer")
        master = job.master()
        keeper = parent_of(master)
        os.kill(keeper, signal.SIGSTOP)
        os.kill(master, signal.SIGKILL)
        job.order("end-trainer", 3)
        wait_until(lambda: not is_alive(trainer["pid"]))
        os.kill(keeper, signal.SIGCONT)
        errors = job.process.communicate(timeout=60)[1]
    assert job.process.returncode == 3
    assert errors.startswith("error: trainer-0 ended with code 3, which is not retried.")


def test_a_master_that_is_killed_while_it_stops_the_job_stops_the_rest(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        job.order("stubborn")
        os.kill(job.process.pid, signal.SIGTERM)
        job.wait_for("asked", "trainer", 2)
        os.remove(tmp_path / "stubborn")
        kill_master(job)
        job.output()
    assert job.process.returncode == 143
    asked = [each["name"] for each in job.events("asked")]
    assert asked[-2:] == ["loader-0", "parameter-server-0"]
    assert job.ended()


def test_a_master_whose_keeper_is_killed_is_started_again_by_the_launcher(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        started = job.wait_for("start", "", COUNT)
        before = job.master()
        os.kill(parent_of(before), signal.SIGKILL)
        wait_until(lambda: job.master() != before, "another master")
        wait_until(lambda: said(job, "The master was restarted: generation 0, 4 processes."))
        assert all(is_alive(each["pid"]) for each in started)
        job.order("end-trainer", 0)
        lines = job.output()
    assert job.process.returncode == 0
    assert "launcher | The keeper of the master was killed; both are started again." in lines
    assert len(job.events("start")) == COUNT
    assert left(job) == LEFT


def test_without_a_master_processes_end_after_its_timeout(tmp_path):
    with Launched(tmp_path, f"{ROLES}\nmaster_timeout: 1", args=["--detach"]) as job:
        started = job.wait_for("start", "", COUNT)
        job.output()
        os.kill(parent_of(job.master()), signal.SIGKILL)
        wait_until(job.ended)
        wait_until(lambda: not keepers_in(job.run_folder))
        assert not any(is_alive(each["pid"]) for each in started)
        assert list((job.run_folder / "processes").glob("[tpl]*")) == []


def test_a_detached_job_runs_on_without_its_launcher(tmp_path, capsys):
    with Launched(tmp_path, ROLES, args=["--detach"]) as job:
        lines = job.output()
        assert job.process.returncode == 0
        assert lines[-1].startswith("Job test runs. Follow it: karvan logs test --follow.")
        started = job.wait_for("start", "", COUNT)
        kill_master(job)
        assert all(is_alive(each["pid"]) for each in started)
        job.order("end-trainer", 0)
        wait_until(job.ended)
        wait_until(lambda: not keepers_in(job.run_folder))
        assert RunFolder(job.run_folder).outcome()["code"] == 0
        assert left(job) == LEFT


def test_a_launcher_that_is_killed_before_the_job_runs_leaves_a_detached_one_alone(tmp_path):
    with Launched(tmp_path, ROLES, args=["--detach"]) as job:
        job.master()
        job.process.kill()
        job.wait_for("start", "", COUNT)
        job.order("end-trainer", 0)
        wait_until(job.ended)
    assert RunFolder(job.run_folder).outcome()["code"] == 0


@pytest.mark.parametrize("victim", ["master first", "launcher first"])
def test_a_job_whose_launcher_and_master_are_killed_stops_in_order(tmp_path, victim):
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        victims = [job.master(), job.process.pid]
        for pid in victims if victim == "master first" else reversed(victims):
            os.kill(pid, signal.SIGKILL)
        job.process.wait()
        wait_until(job.ended)
        wait_until(lambda: not keepers_in(job.run_folder))
    asked = [each["name"] for each in job.events("asked")]
    assert sorted(asked[:2]) == ["trainer-0", "trainer-1"]
    assert asked[2:] == ["loader-0", "parameter-server-0"]
    assert RunFolder(job.run_folder).outcome()["code"] == 143
    assert left(job) == LEFT


def test_a_job_that_runs_is_not_started_twice(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        second = Launched(tmp_path, ROLES, stderr=subprocess.PIPE)
        errors = second.process.communicate(timeout=60)[1]
        assert second.process.returncode == 2
        assert errors.startswith(f"error: Job 'test' runs already (process {job.master()})")
        # Nor is a second master, whoever starts it.
        command = [sys.executable, "-m", "karvan.launch.master", str(job.run_folder)]
        third = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert third.returncode == 1
        assert "error: Job 'test' runs already" in third.stdout
        job.order("end-trainer", 0)
        job.output()
    assert job.process.returncode == 0
    assert len(job.events("start")) == COUNT


def test_a_master_that_cannot_start_again_gives_up_and_ends_everything(tmp_path):
    ports = f"{ROLES}\nmax_restarts: 2\nregistry_port: {free_port()}\nmaster_timeout: 3"
    with Launched(tmp_path, ports, stderr=subprocess.PIPE) as job:
        started = job.wait_for("start", "", COUNT)
        assert (job.run_folder / "tls-key.pem").exists()
        master = job.master()
        (job.run_folder / "state.json").write_text("{")  # no master can read it
        os.kill(master, signal.SIGKILL)
        errors = job.process.communicate(timeout=120)[1]
        wait_until(lambda: not any(is_alive(each["pid"]) for each in started))
    assert job.process.returncode == 1
    assert "The master of job test ended with code 1, and could not be restarted. Its last lines:" in errors
    assert set(left(job)) <= set(LEFT)  # neither a token nor a key


def test_a_master_that_cannot_start_at_all_is_not_restarted(tmp_path, monkeypatch):
    """As with an installation that lacks a part: nothing of the job runs yet, so another try is no use."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("import sys\nsys.modules['pyarrow.flight'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{broken}{os.pathsep}{os.environ['PYTHONPATH']}")
    with Launched(tmp_path, ROLES, kind=NEW, stderr=subprocess.PIPE) as job:
        errors = job.process.communicate(timeout=60)[1]
    assert job.process.returncode == 1
    assert errors.startswith(
        "error: The master could not start: ModuleNotFoundError: import of pyarrow.flight"
    )
    assert len(said(job, "Traceback")) == 1
    assert job.events("start") == []
    assert left(job) == LEFT


def test_a_job_can_be_launched_again_after_all_of_it_was_killed(tmp_path):
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        for pid in [job.process.pid, parent_of(job.master()), *keepers_in(job.run_folder)]:
            kill(pid)  # a keeper may end with the master
        wait_until(job.ended)
        again = Launched(tmp_path, ROLES)
        again.wait_for("start", "", 2 * COUNT)
        again.order("end-trainer", 0)
        again.output()
    assert again.process.returncode == 0
    assert main(["status", "test"]) == 0
