"""`karvan status`, `karvan logs` and `karvan stop`, in every state of a job."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest
from forked_programs import ForkedProgram
from launch_helpers import Launched, keepers_in, wait_until
from processes import is_alive, kill, parent_of
from small_disk import small_disk
from wire_helpers import wait_for

from karvan.cli.main import main
from karvan.data.work_client import WorkClient
from karvan.launch.run_folder import RunFolder, RunFolderError, make_private
from karvan.wire import Security
from karvan.work.task import WorkSpec, holder_of

ROLES = "roles: {trainers: 1, parameter_servers: 1, loaders: 1}"
COUNT = 3


@pytest.fixture
def run(capsys):
    """run("status", "test") runs a command here: its code, output and errors."""

    def run(*words):
        code = main([str(word) for word in words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def status_of(run):
    code, out, err = run("status", "test", "--json", "-")
    assert code == 0, err
    return json.loads(out)


def test_status_shows_the_processes_of_a_running_job_and_how_one_that_ended_did(tmp_path, run):
    with Launched(tmp_path, ROLES, args=["quick", "loader", "trainer"]) as job:
        started = {each["name"]: each["pid"] for each in job.wait_for("start", "", COUNT)}
        job.wait_for("beat", "trainer")
        job.wait_for("beat", "loader")
        found = status_of(run)
        assert (found["job"], found["state"], found["generation"]) == ("test", "running", 0)
        assert found["master"] == job.master()
        shown = {f"{each['role']}-{each['index']}": each for each in found["processes"]}
        assert {name: each["pid"] for name, each in shown.items()} == started
        assert [shown[name]["state"] for name in started] == [
            "starting" if name == "parameter-server-0" else "running" for name in started
        ]
        assert shown["trainer-0"]["activity"].startswith("fit")
        assert shown["trainer-0"]["heartbeat"] < 60
        code, out, _ = run("status", tmp_path / "job.yaml")
        assert code == 0
        assert "Job test: running" in out
        code, _, err = run("scale", "test", "trainers=2")
        assert code == 2
        assert err.startswith(
            "error: Job 'test': its number of trainers is fixed, 1: only jobs with sharding"
        )
        assert "RefusedError" not in err
        assert str(started["loader-0"]) in out
        assert "test" in run("status")[1]
        job.order("end-trainer", 0)
        job.output()
    ended = status_of(run)
    assert (ended["state"], ended["code"], ended["failure"]) == ("ended", 0, None)
    assert "Job test: it ended with code 0" in run("status", "test")[1]
    [row] = json.loads(run("status", "--json", "-")[1])
    assert (row["job"], row["state"], row["code"]) == ("test", "ended", 0)


def test_status_shows_why_a_job_failed(tmp_path, run):
    with Launched(tmp_path, ROLES, stderr=subprocess.DEVNULL) as job:
        job.order("end-trainer", 3)
        job.output()
    assert job.process.returncode == 3
    assert "trainer-0 ended with code 3, which is not retried." in status_of(run)["failure"]
    assert run("stop", "test")[:2][0] == 0
    assert "does not run: it ended with code 3" in run("stop", "test")[1]


def test_a_job_that_is_not_known_is_told_with_code_3(tmp_path, run):
    for command in ("status", "logs", "stop"):
        code, out, err = run(command, "nobody")
        assert (code, out) == (3, "")
        assert "got 'nobody'; there are none." in err
    assert run("status", "../etc")[0] == 3
    assert run("status", tmp_path / "none.yaml")[0] == 3


@pytest.mark.parametrize(
    "damage", ["", '{"spec": ', "{}", '{"launched": 3, "code": "0"}', "\0" * 4096, "[" * 10**5]
)
@pytest.mark.parametrize("file", ["job.json", "outcome.json"])
def test_damage_is_told_for_the_damaged_job_alone(run, tmp_path, file, damage):
    for name in ("good", "bad"):
        folder = RunFolder.of_job(name)
        make_private(folder.path)
        folder.write_job({"launched": "today", "detached": False, "spec": {}, "commands": {}})
        folder.write_outcome(0, None, 0)
    (RunFolder.of_job("bad").path / file).write_text(damage)
    bad, good = json.loads(run("status", "--json", "-")[1])
    assert (bad["job"], bad["state"]) == ("bad", "damaged")
    assert (good["job"], good["state"], good["code"]) == ("good", "ended", 0)
    assert run("status")[0] == 0
    assert "ended with code 0" in run("status", "good")[1]
    for command in ("status", "stop"):
        code, out, err = run(command, "bad")
        assert (code, out) == (3, "")
        assert f"bad/{file} is damaged" in err
        assert "`karvan launch`" in err


def test_a_job_whose_files_cannot_be_read_is_shown_as_damaged_among_others(run):
    for name in ("bad", "good"):
        folder = RunFolder.of_job(name)
        make_private(folder.path)
        folder.write_job({"launched": "today", "detached": False, "spec": {}, "commands": {}})
        folder.write_outcome(0, None, 0)
    RunFolder.of_job("bad").outcome_file.unlink()
    RunFolder.of_job("bad").outcome_file.mkdir()
    bad, good = json.loads(run("status", "--json", "-")[1])
    assert (bad["state"], good["state"]) == ("damaged", "ended")


def test_a_job_whose_description_is_damaged_can_be_launched_again_unless_it_runs(caplog):
    folder = RunFolder.of_job("bad")
    make_private(folder.path)
    (folder.path / "job.json").touch()
    with folder.launching():
        assert "bad/job.json is damaged: it is empty" in caplog.text
    with folder.path.joinpath("master.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match=r"is damaged.*its processes still run"), folder.launching():
            pass


def test_a_master_starts_again_at_its_address_while_the_disk_of_its_folder_is_full(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        folder = RunFolder(disk.folder / "test")
        folder.path.mkdir()
        folder.write_master("127.0.0.1:1")
        disk.fill()
        folder.write_master("127.0.0.1:1")
        with pytest.raises(OSError, match="No space left"):
            folder.write_master("127.0.0.1:2")
        assert folder.master()["address"] == "127.0.0.1:1"


def test_stop_lets_trainers_save_and_now_kills(tmp_path, run):
    for now in ([], ["--now"]):
        with Launched(tmp_path, ROLES, args=["--detach"]) as job:
            job.output()
            begun = len(job.events("start")) - COUNT
            job.wait_for("start", "", begun + COUNT)
            if now:
                job.order("stubborn")
            asked = len(job.events("asked"))
            code, out, _ = run("stop", "test", *now)
            assert code == 0
            assert "Job test: it was stopped, with code 143" in out
            wait_until(job.ended)
            wait_until(lambda job=job: not keepers_in(job.run_folder))
            if now:
                assert len(job.events("asked")) - asked <= 1  # nobody was waited for
            else:
                assert job.events("asked")[0]["name"] == "trainer-0"
    assert status_of(run)["code"] == 143


def test_a_master_that_does_not_answer_is_told_with_code_75(tmp_path, run, monkeypatch):
    monkeypatch.setattr("karvan.launch.job_calls._DEADLINE", 2.0)
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        master = job.master()
        os.kill(master, signal.SIGSTOP)
        try:
            code, out, err = run("status", "test")
            assert (code, out) == (75, "")
            assert "The master of job 'test' at unix:" in err
            assert f"kill -CONT {master}" in err
        finally:
            os.kill(master, signal.SIGCONT)
        assert status_of(run)["state"] == "running"


def test_a_job_all_of_which_was_killed_is_not_said_to_run(tmp_path, run):
    with Launched(tmp_path, ROLES, args=["--detach"]) as job:
        job.output()
        started = job.wait_for("start", "", COUNT)
        for pid in {parent_of(job.master()), *keepers_in(job.run_folder)}:
            kill(pid)
        wait_until(lambda: not any(is_alive(each["pid"]) for each in started))
        wait_until(job.ended)
        assert status_of(run)["code"] is None
        assert (job.run_folder / "token").exists()
        with (job.run_folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert run("stop", "test")[0] == 0
            assert (job.run_folder / "token").exists()  # may be that of a launcher that is starting the job
        code, out, _ = run("stop", "test")
        assert code == 0
        assert "it ended without saying how" in out
        assert sorted(path.name for path in job.run_folder.iterdir()) == ["job.json", "lock", "logs"]


def test_logs_show_all_lines_or_those_of_a_process(tmp_path, run):
    with Launched(tmp_path, ROLES) as job:
        job.wait_for("start", "", COUNT)
        wait_until(lambda: "trainer-0 | trainer-0 was here" in run("logs", "test")[1])
        assert run("logs", "test", "loader-0") == (0, "loader-0 was here\n", "")
        code, out, err = run("logs", "test", "loader-7")
        assert (code, out) == (3, "")
        assert "that has a log (loader-0, master-0, parameter-server-0, trainer-0), got 'loader-7'." in err
        command = [sys.executable, "-m", "karvan", "logs", "test", "--follow", "--tail", "1"]
        follower = ForkedProgram(command, stdout=subprocess.PIPE)
        assert follower.stdout.readline().endswith(" was here\n")
        job.order("end-trainer", 0)
        printed = job.output()
        followed = follower.communicate(timeout=60)[0].splitlines()
    lines = run("logs", "test")[1].splitlines()
    assert lines == printed  # what the launcher has shown
    assert not any(line.startswith("job | ") for line in lines)
    assert "launcher | trainer-0 is done." in followed
    assert len(followed) < len(lines)
    assert run("logs", "test", "trainer-0", "--tail", 0) == (0, "", "")
    (job.run_folder / "logs" / "trainer-1.log").touch()
    said = "trainer-1 of job test has no lines. Only rank 0, which is usually trainer-0, shows progress.\n"
    assert run("logs", "test", "trainer-1") == (0, "", said)


def test_the_tasks_of_a_trainer_that_dies_are_given_back(tmp_path, run):
    with Launched(tmp_path, ROLES) as job:
        trainer = job.wait_for("start", "trainer")[0]
        job.wait_for("start", "", COUNT)
        path = job.run_folder / "token"
        address = trainer["env"]["KARVAN_REGISTRY"]
        holder = holder_of("trainer", 0, trainer["env"]["KARVAN_PROCESS"], "part")
        client = WorkClient(address, holder, Security(token=path.read_text().strip()))
        client.open(WorkSpec((("f", 10),), 2, epochs=2))
        first = client.lease(most=3)
        client.acknowledge({first[0].token: 2})
        found = status_of(run)["work"]
        assert (found["done"], found["leased"], found["waiting"], found["tasks"]) == (1, 2, 0, 5)
        assert "epoch 1 of 2, tasks: 1 of 5 done, 2 leased, 0 waiting" in run("status", "test")[1]
        os.kill(job.master(), signal.SIGKILL)  # the ledger is as before
        job.kill("trainer-0")
        wait_for(lambda: status_of(run)["work"]["waiting"] == 2)
        other = WorkClient(address, "another", Security(token=path.read_text().strip()))
        assert sorted(lease.task.first for lease in other.lease(most=2)) == [2, 4]
        other.close()
        client.close()
        job.wait_for("start", "trainer", 2)
        job.order("end-trainer", 0)
        lines = job.output()
    assert "launcher | 2 tasks of trainer-0 are leased to others." in lines
