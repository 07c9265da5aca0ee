"""What a job does when its processes end, die or hang."""

import json
import os
import signal
import sys
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import pytest
from launch_helpers import QUICK, Running, small_commands, wait_until
from processes import is_alive
from support_paths import support_path

from karvan.data.work_client import WorkClient
from karvan.discovery.registry import Registry
from karvan.distributed.elastic import GroupClient
from karvan.launch.health import Timing
from karvan.work.service import WorkService
from karvan.work.task import WorkSpec, holder_of
from karvan.work.trainer_group import TrainerGroup

ALL = {"trainers": 2, "parameter_servers": 2, "embedding_workers": 1, "loaders": 1}
COUNT = 6


def pids(events):
    return {each["name"]: each["pid"] for each in events}


def test_roles_start_in_order_and_stop_in_order_when_all_trainers_are_done(tmp_path):
    with Running(tmp_path, ALL) as job:
        job.wait_for("start", "", COUNT)
        job.order("end-trainer", 0)
        outcome = job.outcome()
    assert (outcome.code, outcome.failure) == (0, None)
    started = [line.split()[3].strip(",") for line in job.lines if line.startswith("launcher | Started")]
    assert started == [
        *("parameter-server-0", "parameter-server-1"),
        *("embedding-worker-0", "loader-0", "trainer-0", "trainer-1"),
    ]
    asked = [each["name"] for each in job.events("asked")]
    assert asked[:2] == ["loader-0", "embedding-worker-0"]
    assert sorted(asked[2:]) == ["parameter-server-0", "parameter-server-1"]
    assert not any(map(is_alive, pids(job.events("start")).values()))


def test_processes_find_the_job_in_their_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KARVAN_ON_SERVER_LOSS", "reload")  # of another job
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("MASTER_PORT", "9")
    roles = {
        "trainers": {"replicas": 2, "threads": 3, "env": {"MINE": 5}},
        "parameter_servers": {"replicas": 2, "port": 5000, "capacity": 1000},
    }
    more = {"data": {"train": "a/*.parquet"}, "checkpoints": "out/run", "wire": "bfloat16"}
    with Running(tmp_path, roles, **more) as job:
        found = {each["name"]: each["env"] for each in job.wait_for("start", "", 4)}
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert len({each.pop("KARVAN_PROCESS") for each in found.values()}) == 4  # a random id of each
    assert len({each.pop("KARVAN_MASTER_ADDRESS_FILE") for each in found.values()}) == 4
    assert len({each.pop("KARVAN_JOBS") for each in found.values()}) == 1  # of all tests
    server, trainer = found["parameter-server-1"], found["trainer-1"]
    common = {
        "KARVAN_JOB": "test",
        "KARVAN_INDEX": "1",
        "KARVAN_COUNT": "2",
        "KARVAN_REGISTRY": "127.0.0.1:4711",
        "KARVAN_GENERATION": "0",
        "KARVAN_MODE": "hybrid",
        "KARVAN_STALENESS": "4",
        "KARVAN_WIRE": "bfloat16",
        "KARVAN_TRAINER_COUNT": "2",
        "KARVAN_PARAMETER_SERVER_COUNT": "2",
        "KARVAN_EMBEDDING_WORKER_COUNT": "0",
        "KARVAN_LOADER_COUNT": "0",
        "KARVAN_HOST": "127.0.0.1",
        "KARVAN_ON_SERVER_LOSS": "rollback",
        "KARVAN_CHECKPOINTS": "out/run",
        "KARVAN_DATA": '{"train": "a/*.parquet"}',
    }
    server.pop("OMP_NUM_THREADS", None)  # of whoever runs the tests
    of_server = {"KARVAN_ROLE": "parameter-server", "KARVAN_PORT": "5001", "KARVAN_CAPACITY": "1000"}
    assert server == {**common, **of_server}
    assert trainer == {
        **common,
        **{"KARVAN_ROLE": "trainer", "KARVAN_PORT": "0", "KARVAN_THREADS": "3", "OMP_NUM_THREADS": "3"},
        **{"MINE": "5", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        **{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"},
    }


@pytest.mark.parametrize("name", ["loader-0", "embedding-worker-0"])
def test_a_loader_or_worker_that_dies_is_started_again_alone(tmp_path, name):
    with Running(tmp_path, ALL) as job:
        before = pids(job.wait_for("start", "", COUNT))
        job.kill(name)
        again = job.wait_for("start", name, 2)[-1]
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert len(job.events("start")) == COUNT + 1
    assert again["pid"] != before[name]
    assert again["env"]["KARVAN_GENERATION"] == "0"
    assert f"launcher | {name} was killed by SIGKILL; it is restarted." in job.lines


@pytest.mark.parametrize("name", ["trainer-1", "parameter-server-1"])
def test_after_the_death_of_a_trainer_or_server_all_trainers_begin_a_new_generation(tmp_path, name):
    with Running(tmp_path, ALL) as job:
        before = pids(job.wait_for("start", "", COUNT))
        job.kill(name)
        trainers = job.wait_for("start", "trainer", 4)[2:]
        servers = job.wait_for("start", "parameter-server", 2 + ("server" in name))[2:]
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert sorted(each["name"] for each in trainers) == ["trainer-0", "trainer-1"]
    assert {each["env"]["KARVAN_GENERATION"] for each in (*trainers, *servers)} == {"1"}
    assert job.registry.generations == [1]
    assert [each["name"] for each in servers] == ([name] if "server" in name else [])
    assert all(each["env"]["KARVAN_ON_SERVER_LOSS"] == "rollback" for each in servers)
    assert not is_alive(before["trainer-0"])
    assert len(job.events("start", "loader")) == len(job.events("start", "embedding")) == 1
    assert job.events("asked", "trainer") == []  # they were killed


def test_a_lost_server_takes_its_rows_as_they_were_saved_if_asked(tmp_path):
    roles = {**ALL, "embedding_workers": 0}
    with Running(tmp_path, roles, on_server_loss="reload", checkpoints=str(tmp_path / "saved")) as job:
        job.wait_for("start", "", COUNT - 1)
        job.kill("parameter-server-0")
        again = job.wait_for("start", "parameter-server-0", 2)[-1]
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert again["env"]["KARVAN_ON_SERVER_LOSS"] == "reload"
    assert again["env"]["KARVAN_GENERATION"] == "0"
    assert len(job.events("start")) == COUNT


def test_a_loader_that_is_done_is_wanted_once_more_after_a_rollback(tmp_path):
    with Running(tmp_path, {"loaders": 1}) as job:
        job.wait_for("start", "", 3)
        job.order("end-loader", 0)
        wait_until(lambda: "launcher | loader-0 is done." in job.lines)
        assert len(job.events("start", "loader")) == 1
        job.kill("trainer-0")
        job.wait_for("start", "loader", 2)
        job.wait_for("start", "trainer", 2)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0


def test_too_many_deaths_fail_the_job_and_show_the_last_lines(tmp_path):
    with Running(tmp_path, {"loaders": 1}, max_restarts=2) as job:
        job.order("end-loader", 7)
        outcome = job.outcome()
    assert outcome.code == 1
    assert outcome.failure.startswith("loader-0 ended with code 7, after 2 restarts within 600 seconds.")
    assert outcome.failure.endswith("loader-0 was here")
    assert len(job.events("start", "loader")) == 3


def test_a_trainer_that_fails_from_the_same_checkpoint_is_given_up(tmp_path):
    with Running(tmp_path, {}, checkpoints=str(tmp_path / "checkpoints")) as job:
        job.order("end-trainer", 1)
        outcome = job.outcome()
    assert outcome.code == 1
    assert outcome.failure.splitlines() == [
        "trainer-0 ended with code 1, again without a newer checkpoint. Its last lines:",
        "trainer-0 was here",
    ]
    assert len(job.events("start", "trainer")) == 3


def test_a_trainer_that_fails_but_has_saved_is_started_again(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    with Running(tmp_path, {}, checkpoints=str(checkpoints)) as job:
        job.order("once")
        for times in range(1, 6):
            job.wait_for("start", "trainer", times)
            (checkpoints / f"step-{times:012d}").mkdir(parents=True)
            job.order("end-trainer", 1)
        job.wait_for("start", "trainer", 6)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0


def test_trainers_that_wait_for_their_restart_start_after_a_rollback_and_not_before(tmp_path):
    group = TrainerGroup(least=2)
    timing = replace(QUICK, backoff=1.0)
    more = {"sharding": "dynamic", "checkpoints": str(tmp_path / "checkpoints")}
    with (
        closing(Registry(beside=[group])) as registry,
        Running(tmp_path, {"trainers": 2}, timing, group=group, **more) as job,
    ):
        job.wait_for("start", "", 3)
        trainers = job.job.members.of("trainer")
        names = [holder_of(each.role, each.index, each.token) for each in trainers]
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(GroupClient(registry.address, name))) for name in names]
            wait_until(
                lambda: len([each for each in clients if each.join(0)]) == 2, "a round of both trainers"
            )
        job.kill("trainer-1")
        wait_until(lambda: trainers[1].due is not None, "its restart to be planned")
        job.kill("parameter-server-0")
        job.wait_for("start", "trainer", 4)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    began = job.lines.index("launcher | Generation 1 begins.")
    died = next(number for number, line in enumerate(job.lines) if "parameter-server-0 was killed" in line)
    assert not [line for line in job.lines[died:began] if "Started" in line]
    assert len(job.events("start", "trainer")) == 4


ELASTIC = {"sharding": "dynamic", "mode": "hybrid", "max_restarts": 3}


def test_a_trainer_that_dies_before_there_is_a_group_is_restarted_alone(tmp_path):
    group = TrainerGroup(least=3)
    with Running(tmp_path, {"trainers": 3}, group=group, **ELASTIC) as job:
        job.wait_for("start", "trainer", 3)
        for name in ("trainer-1", "trainer-0", "trainer-1"):
            times = len(job.events("start", name))
            job.kill(name)
            job.wait_for("start", name, times + 1)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert len(job.events("start", "trainer-2")) == 1
    assert "launcher | trainer-1 was killed by SIGKILL; it is restarted." in job.lines
    assert not [line for line in job.lines if "Generation" in line]


def test_deaths_of_one_cause_before_there_is_a_group_count_once(tmp_path):
    slow = replace(QUICK, backoff=1.0)
    with Running(tmp_path, {"trainers": 6}, slow, group=TrainerGroup(least=6), **ELASTIC) as job:
        started = job.wait_for("start", "trainer", 6)
        for each in started:
            os.kill(each["pid"], signal.SIGKILL)
        job.wait_for("start", "trainer", 12)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert not [line for line in job.lines if "Generation" in line]


def test_fewer_trainers_before_there_is_a_group_cost_nobody_a_restart(tmp_path):
    roles, group = {"trainers": {"min": 1, "max": 3}}, TrainerGroup(least=1)
    with Running(tmp_path, roles, group=group, **{**ELASTIC, "max_restarts": 0}) as job:
        job.wait_for("start", "trainer", 3)
        job.job.scale(1)
        wait_until(lambda: len([line for line in job.lines if "continues with fewer trainers" in line]) == 2)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert len(job.events("start", "trainer")) == 3


def test_a_program_that_fails_at_its_start_ends_an_elastic_job_after_three_times(tmp_path):
    slow = replace(QUICK, backoff=0.5)
    with Running(tmp_path, {"trainers": 4}, slow, group=TrainerGroup(least=4), **ELASTIC) as job:
        job.order("end-trainer", 1)
        outcome = job.outcome()
    assert outcome.code == 1
    assert "ended with code 1" in outcome.failure
    assert 4 < len(job.events("start", "trainer")) <= 12


@pytest.mark.parametrize("state", ["waits for its restart", "starts", "waits for the others"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_job_ends_without_a_trainer_that_is_only_being_restarted_when_all_work_is_done(
    tmp_path, state, complete
):
    stays = {"code": 0, "after": "end-1"}
    for name, order in (("trainer-0", {"code": 0, "after": "end-0"}), ("trainer-1", stays)):
        (tmp_path / f"{name}.json").write_text(json.dumps([order]))
    program = (sys.executable, "-IS", str(support_path("launch/failing_program.py")), str(tmp_path))
    commands = {**small_commands(tmp_path), "trainer": program}
    timing = replace(QUICK, settle=1000.0, backoff=1000.0 if state == "waits for its restart" else 0.01)
    group, work = TrainerGroup(least=2), WorkService(tmp_path / "work.db")
    with (
        closing(work),
        closing(Registry(beside=[group, work])) as registry,
        Running(
            *(tmp_path, {"trainers": 2}, timing, commands),
            **{"group": group, "work": work, "sharding": "dynamic", "mode": "hybrid"},
        ) as job,
    ):
        trainers = job.job.members.of("trainer")
        wait_until(lambda: all(each.running for each in trainers))
        holders = [holder_of(each.role, each.index, each.token) for each in trainers]
        with (
            _clients(registry, GroupClient, holders) as members,
            _clients(registry, WorkClient, holders) as clients,
        ):
            wait_until(lambda: len([each for each in members if each.join(0)]) == 2, "a round of both")
            clients[0].open(WorkSpec((("f", 10),), 5))
            tokens = [each.token for each in clients[0].lease(most=2)]
            clients[0].acknowledge(dict.fromkeys(tokens if complete else tokens[:1], 5))
        job.registry.present.add("trainer-0")
        wait_until(lambda: trainers[0].registration == "present")
        process = trainers[1].process
        trainers[1].handle.kill()
        wait_until(lambda: trainers[1].due is not None or trainers[1].process is not process)
        if state != "waits for its restart":
            wait_until(lambda: trainers[1].process is not process and trainers[1].running)
        if state == "waits for the others":
            job.registry.present.add("trainer-1")
            wait_until(lambda: trainers[1].registration == "present")
        job.order("end-0")
        if not complete:
            wait_until(lambda: trainers[0].code == 0)
            wait_until(lambda: "launcher | trainer-0 is done." in job.lines)
            assert not job.job.stopping
            job.job.interrupt(signal.SIGTERM)
        assert job.outcome().code == (0 if complete else 143)
    text = "launcher | The job ends without trainer-1: all work is done while it is restarted."
    assert (text in job.lines) == complete


@contextmanager
def _clients(registry, kind, names):
    with ExitStack() as stack:
        yield [stack.enter_context(closing(kind(registry.address, name))) for name in names]


def test_a_rollback_says_where_trainers_continue(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    with Running(tmp_path, {}, checkpoints=str(checkpoints)) as job:
        for times, folder in enumerate(["new", "step-000000000007"], 1):
            job.wait_for("start", "trainer", times)  # the supervisor has spoken of the death before
            (checkpoints / folder).mkdir(parents=True)
            job.kill("trainer-0")
        job.wait_for("start", "trainer", 3)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert [line.partition("SIGKILL; ")[2] for line in job.lines if "SIGKILL" in line] == [
        "all trainers start from the beginning, because there is no checkpoint yet.",
        "all trainers go back to the newest checkpoint, step-000000000007.",
    ]


def test_a_rollback_of_a_job_without_a_folder_does_not_promise_a_checkpoint(tmp_path):
    with Running(tmp_path, {}) as job:
        job.wait_for("start", "trainer")
        job.kill("trainer-0")
        job.wait_for("start", "trainer", 2)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    said = (
        "trainer-0 was killed by SIGKILL; all trainers continue from the newest checkpoint if they have one."
    )
    assert f"launcher | {said}" in job.lines


def test_deaths_long_ago_do_not_count(tmp_path):
    with Running(tmp_path, {"loaders": 1}, max_restarts=1, restart_window=1e-9) as job:
        for times in range(1, 4):
            job.wait_for("start", "loader", times)
            job.kill("loader-0")
        job.wait_for("start", "loader", 4)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0


@pytest.mark.parametrize(("role", "code"), [("trainer", 2), ("trainer", 3), ("parameter-server", 2)])
def test_wrong_usage_and_missing_data_are_not_tried_again(tmp_path, role, code):
    with Running(tmp_path, {}) as job:
        job.order(f"end-{role}", code)
        outcome = job.outcome()
    assert outcome.code == code
    assert f"{role}-0 ended with code {code}, which is not retried" in outcome.failure
    assert len(job.events("start", role)) == 1


@pytest.mark.parametrize(("name", "trainers"), [("loader-0", 1), ("trainer-0", 2)])
def test_a_process_that_is_not_healthy_is_killed_and_dies(tmp_path, name, trainers):
    with Running(tmp_path, {"loaders": 1}) as job:
        old = pids(job.wait_for("start", "", 3))[name]
        job.registry.sick.add(name)
        wait_until(lambda: not is_alive(old))
        job.registry.sick.clear()
        job.wait_for("start", name, 2)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert f"launcher | {name} does not answer any more; it is killed." in job.lines


def test_a_process_is_not_judged_before_it_has_settled(tmp_path):
    with Running(tmp_path, {"loaders": 1}, Timing(check=0.001, settle=1000.0)) as job:
        job.registry.sick.update({"loader-0", "trainer-0"})
        job.wait_for("start", "", 3)
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    assert len(job.events("start")) == 3


def test_what_a_role_has_started_ends_with_it(tmp_path):
    job = Running(tmp_path, {})
    job.order("parent")
    with job:
        [trainer] = job.wait_for("start", "trainer")
        [server] = job.wait_for("start", "parameter-server")
        job.kill("trainer-0")
        job.wait_for("start", "trainer", 2)
        wait_until(lambda: not is_alive(trainer["child"]))
        assert is_alive(server["child"])
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    wait_until(lambda: not is_alive(server["child"]))  # a kill takes a moment


def test_who_does_not_stop_in_time_is_killed(tmp_path):
    with Running(tmp_path, {}, grace=0.1) as job:
        job.order("stubborn")
        job.wait_for("start", "", 2)
        job.job.interrupt(signal.SIGTERM)
        assert job.outcome().code == 143
    assert [each["name"] for each in job.events("asked")] == ["trainer-0", "parameter-server-0"]
    assert not any(map(is_alive, pids(job.events("start")).values()))


def test_a_program_that_is_not_there_is_told(tmp_path):
    nothing = dict.fromkeys(["trainer", "parameter-server"], ("/nowhere/python",))
    with Running(tmp_path, {}, commands=nothing, max_restarts=0) as job:
        outcome = job.outcome()
    assert outcome.code == 1
    assert "/nowhere/python: No such file or directory." in outcome.failure
