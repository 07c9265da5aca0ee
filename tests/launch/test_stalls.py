"""Processes that live but make no progress: who is the culprit, what is said, and what happens to it."""

import io
import os
import signal
import time
from dataclasses import replace

import pytest
from launch_helpers import QUICK, Known, Launched, Running, wait_until
from processes import is_alive

from karvan.activity import ActivityReport
from karvan.clock import clock
from karvan.job.roles import Role, role_of
from karvan.launch.health import SERVICE_TIMEOUT, HealthCheck, Timing, find_stalls
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.processes import ManagedProcesses

T = 100.0


def doing(idle, task="", **waits):
    names = {name.replace("_", "-"): seconds for name, seconds in waits.items()}
    return ActivityReport(7, idle, task, names, dumps=True)


def culprits(timeout=T, **reports):
    activities = {}
    for name, report in reports.items():
        role, _, index = name.rpartition("_")
        activities[role_of(role.replace("_", "-")), int(index)] = report
    return [each.name for each in find_stalls(activities, timeout)]


def test_a_trainer_that_does_nothing_in_a_fit_is_the_culprit():
    assert culprits(trainer_0=doing(T, "fit")) == ["trainer-0"]
    assert culprits(trainer_0=doing(T - 1, "fit")) == []


def test_a_trainer_that_runs_code_of_its_own_is_left_alone():
    assert culprits(trainer_0=doing(10 * T)) == []


def test_a_loader_is_the_culprit_if_somebody_waits_for_it():
    waiting = doing(T, "fit", loader_1=T)
    assert culprits(trainer_0=waiting, loader_0=doing(T), loader_1=doing(T)) == ["loader-1"]
    assert culprits(trainer_0=doing(0, "fit"), loader_0=doing(9 * T), loader_1=doing(9 * T)) == []
    assert culprits(trainer_0=waiting, loader_1=doing(1)) == []


def test_a_loader_that_waits_itself_is_not_the_culprit_but_whom_it_waits_for():
    held_up = {
        "trainer_0": doing(2 * T, "fit", loader_0=2 * T),
        "loader_0": doing(2 * T, embedding_worker_0=T),
        "embedding_worker_0": doing(2 * T),
    }
    assert culprits(**held_up) == ["embedding-worker-0"]
    held_up["embedding_worker_0"] = doing(2 * T, parameter_server_1=T)
    held_up["parameter_server_1"] = doing(2 * T)
    assert culprits(**held_up) == ["parameter-server-1"]
    held_up["parameter_server_1"] = doing(2 * T, trainers=T)
    assert culprits(**held_up) == []


def test_a_server_that_waits_for_trainers_points_at_the_one_that_does_not_come():
    reports = {
        "trainer_0": doing(T, "fit", parameter_server_0=T),
        "parameter_server_0": doing(T, trainers=T),
        "trainer_1": doing(T, "fit"),
    }
    assert culprits(**reports) == ["trainer-1"]


def test_trainers_that_wait_for_one_of_them_are_not_culprits():
    waiting = doing(T, "fit", trainers=T)
    assert culprits(trainer_0=waiting, trainer_1=doing(T, "fit"), trainer_2=waiting) == ["trainer-1"]
    assert culprits(trainer_0=waiting, trainer_1=waiting) == ["trainer-0", "trainer-1"]
    assert culprits(trainer_0=waiting, trainer_1=doing(T)) == []  # user code, between fits


def test_questions_that_are_answered_do_not_count_as_waits():
    assert culprits(trainer_0=doing(T, "fit", parameter_server_0=0.1)) == ["trainer-0"]


def test_roles_without_code_of_a_user_have_less_time():
    reports = {"trainer_0": doing(SERVICE_TIMEOUT, "fit", parameter_server_0=SERVICE_TIMEOUT)}
    assert culprits(7200, **reports, parameter_server_0=doing(SERVICE_TIMEOUT)) == ["parameter-server-0"]


def test_a_stall_says_who_for_how_long_and_who_waits():
    reports = {
        (Role.LOADER, 0): doing(63),
        (Role.TRAINER, 0): doing(62, "fit", loader_0=62),
        (Role.TRAINER, 1): doing(62, "fit", loader_0=62),
    }
    [stall] = find_stalls(reports, 60)
    assert str(stall) == "loader-0 has made no progress for 63 s, and trainer-0 and trainer-1 wait for it"


def test_a_process_that_has_just_been_started_has_time_for_its_first_progress(tmp_path):
    with Running(tmp_path, {"loaders": 1}, Timing(check=0.01, settle=1000.0), stall_timeout=5) as job:
        job.wait_for("start", "", 3)
        waiting = ActivityReport(7, 9.0, "fit", {"loader-0": 9.0})
        job.registry.reports = {(Role.TRAINER, 0): waiting, (Role.LOADER, 0): ActivityReport(0, 9.0)}
        job.kill("parameter-server-0")  # several checks later
        job.wait_for("start", "parameter-server", 2)
        assert len(job.events("start", "loader")) == 1
        job.registry.reports = {(Role.TRAINER, 0): waiting, (Role.LOADER, 0): ActivityReport(1, 9.0)}
        wait_until(lambda: "launcher | loader-0 was killed by SIGKILL; it is restarted." in job.lines)
        job.registry.reports = {}
        job.wait_for("start", "loader", 2)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0


def test_a_process_that_does_not_finish_its_start_is_replaced(tmp_path):
    timing = replace(QUICK, start=1.0)
    late = "launcher | loader-0 has not connected 1 s after its start; it is killed (stall_timeout)."
    with Running(tmp_path, {"loaders": 1}, timing, stall_timeout=1) as job:
        job.registry.present = {"parameter-server-0"}  # the trainers are programs that do not connect
        job.wait_for("start", "loader", 2)
        job.registry.present |= {"loader-0"}
        assert late in job.lines
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert len(job.events("start", "trainer")) == len(job.events("start", "parameter-server")) == 1


def test_a_trainer_that_does_not_connect_as_others_do_is_replaced(tmp_path):
    with Running(tmp_path, {"trainers": 2}, replace(QUICK, start=1.0), stall_timeout=1) as job:
        job.registry.present = {"parameter-server-0", "trainer-0"}
        job.wait_for("start", "trainer-1", 2)
        job.registry.present |= {"trainer-1"}
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert "trainer-1 has not connected 1 s after its start" in "\n".join(job.lines)


class NoRoom:
    """The handle of a process for which its engine has no place; `pid` is set when it has one."""

    pid = None
    killed = False

    def kill(self):
        self.killed = True


def test_the_start_of_a_process_begins_when_there_is_room_for_it():
    members = ManagedProcesses({Role.TRAINER: 1, Role.LOADER: 1})
    timing = Timing(check=0.0, settle=0.0, start=0.2, lost=0.0)
    check = HealthCheck(members, Known(), MergedLogs(stream=io.StringIO()), timing, stall_timeout=0.1)
    [loader] = members.of(Role.LOADER)
    loader.handle, loader.started = NoRoom(), clock.now() - 100.0
    check.check()
    loader.handle.pid = 1
    check.check()
    assert not loader.handle.killed
    time.sleep(0.3)
    check.check()
    assert loader.handle.killed


def test_an_elastic_job_ends_without_a_trainer_that_does_not_start(tmp_path):
    more = {"sharding": "dynamic", "checkpoints": str(tmp_path / "checkpoints"), "grace": 0.1}
    with Running(tmp_path, {"trainers": 2}, replace(QUICK, settle=1.0), **more) as job:
        [hanging] = job.wait_for("start", "trainer-1")
        job.wait_for("start", "trainer-0")
        os.kill(hanging["pid"], signal.SIGSTOP)
        job.registry.present = {"parameter-server-0", "trainer-0"}
        wait_until(lambda: job.job.members.of("trainer")[0].registration == "present")
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert "launcher | The job ends without trainer-1: not connected yet, and no work is left." in job.lines
    wait_until(lambda: not is_alive(hanging["pid"]))


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("trainer", "trainer-0 has made no progress for"),
        ("loader", "loader-0 has made no progress for"),
    ],
)
def test_a_stalled_process_shows_its_stacks_and_is_replaced(tmp_path, role, said):
    text = f"roles: {{loaders: 1}}\nstall_timeout: 1.5\nlogs: {tmp_path}/logs"
    with Launched(tmp_path, text, args=["quick", "loader", "trainer"]) as job:
        log = tmp_path / "logs" / f"{role}-0.log"
        job.wait_for("start", "", 3)
        job.order(f"stall-{role}")
        job.wait_for("start", role, 2)
        stacks = log.read_text()
        assert "in hang_for_ever" in stacks
        assert "most recent call first" in stacks
        (tmp_path / f"stall-{role}").unlink()
        job.order("end-trainer", 0)
        lines = job.output()
    assert job.process.returncode == 0
    [line] = [each for each in lines if said in each]
    assert ("trainer-0 waits for it" in line) == (role == "loader")
    assert "Started parameter-server-0" in "\n".join(lines)
    assert len(job.events("start", "parameter-server")) == 1
    assert len(job.events("start", "loader")) == (2 if role == "loader" else 1)
    assert len(job.events("start", "trainer")) == (2 if role == "trainer" else 1)


@pytest.mark.slow
def test_nobody_is_killed_for_a_stall_if_that_is_switched_off(tmp_path):
    text = f"roles: {{loaders: 1}}\nstall_timeout: 0\nlogs: {tmp_path}/logs"
    with Launched(tmp_path, text, args=["quick", "loader", "trainer"]) as job:
        job.wait_for("start", "", 3)
        job.order("stall-trainer")
        job.wait_for("stalled", "trainer")
        beats = len(job.events("beat", "trainer"))
        job.wait_for("beat", "trainer", beats + 30)  # three seconds
        (tmp_path / "stall-trainer").unlink()
        job.order("end-trainer", 0)
        lines = job.output()
    assert job.process.returncode == 0
    assert not [each for each in lines if "no progress" in each]
    wait_until(lambda: len(job.events("start", "trainer")) == 1)
