"""The Ray engine: deaths of actors, places, room, masters that come and go, and files that travel."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from engine_helpers import Run
from launch_helpers import wait_until
from processes import is_alive, parent_of, state_of
from support_paths import support_path
from test_engines import FAMILY, family_of

from karvan.job.roles import Role, start_order
from karvan.launch.engines.base import Needs

INTERRUPTED = ("try: time.sleep(1000)", "except KeyboardInterrupt as error: print(repr(error))")
MASTER = "return open(os.environ['KARVAN_MASTER_ADDRESS_FILE']).read().strip()"
MOVED = "second:22"
SLEEP = ("import time", "print('ready')", "time.sleep(1000)")


def actor_of(run):
    """The process id of the actor that owns a process: the parent of its keeper."""
    return parent_of(parent_of(run.handle.pid))


def test_output_exit_codes_kills_and_adoption(make_ray, start_on, output, tmp_path):
    """What others test in detail, in as few processes as possible: each takes Ray seconds to start."""
    waits = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    code = ["import os, time", f"def master(): {MASTER}", "print(master())", waits, "print(master())"]
    there = {"KARVAN_REGISTRY": "first:1"}
    ending = start_on(make_ray(), *code, "os._exit(7)", environment=there)
    killed = start_on(make_ray(), *FAMILY, index=1)
    everybody = family_of(killed)
    killed.handle.kill()
    assert killed.end() == -9
    assert not any(map(is_alive, everybody))
    assert ending.first_line() == "first:1"
    adopted = Adopted(make_ray(), output, ending.handle.record, index=2)
    wait_until(lambda: adopted.handle.pid == ending.handle.pid, "the same process")
    (tmp_path / "go").touch()
    codes = {ending.end(), adopted.end()}
    assert codes in ({7}, {7, -9})  # whoever has its code first ends the actor
    assert MOVED in ending.lines + adopted.lines  # the process knows the address of the later master


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_worker_process_of_an_actor(make_ray, start_on, number):
    run = start_on(make_ray(), *FAMILY)
    everybody = family_of(run)
    os.kill(actor_of(run), number)
    assert run.end() == -9
    wait_until(lambda: not any(map(is_alive, everybody)), "all to end")


def folder_of(pid):
    """The temporary folder of the actor that owns a process, from the words of its keeper."""
    words = Path(f"/proc/{parent_of(pid)}/cmdline").read_text().split("\0")
    return next(Path(word) for word in words if Path(word).name.startswith("karvan-role-"))


@pytest.mark.slow
def test_killed_processes_keepers_actors_and_nodes_leave_no_files(make_ray, start_on, nodes):
    engine = make_ray(needs={Role.TRAINER: Needs(cpus=0.1, resources={nodes.resource: 0.1})})
    runs = [start_on(engine, *SLEEP, index=index) for index in range(4)]
    for run in runs:
        run.first_line()
    folders = [folder_of(run.handle.pid) for run in runs]
    keepers = [parent_of(run.handle.pid) for run in runs]
    actors = [parent_of(keeper) for keeper in keepers]
    raylet = parent_of(actors[3])
    assert raylet in nodes.raylets
    assert all(folder.is_dir() for folder in folders)
    os.kill(runs[0].handle.pid, signal.SIGKILL)
    os.kill(actors[1], signal.SIGKILL)
    os.kill(keepers[2], signal.SIGSTOP)  # so that it cannot clean up before it is killed
    os.kill(actors[2], signal.SIGKILL)
    os.kill(keepers[2], signal.SIGKILL)
    os.kill(raylet, signal.SIGKILL)
    assert [run.end() for run in runs] == [-9] * 4
    wait_until(lambda: not any(folders[index].exists() for index in (0, 1, 3)), "keepers to clean up")
    last = start_on(engine, *SLEEP, index=4)
    last.first_line()
    assert not folders[2].exists()
    own = folder_of(last.handle.pid)
    last.handle.kill()
    last.end()
    wait_until(lambda: not own.exists(), "its own folder to be removed")


@pytest.mark.slow
def test_an_actor_that_does_not_answer_is_given_up_after_a_kill(make_ray, start_on, monkeypatch):
    monkeypatch.setattr("karvan.launch.engines.ray.engine._KILLED_WITHIN", 1.0)
    run = start_on(make_ray(), *FAMILY)
    everybody = family_of(run)
    actor = actor_of(run)
    os.kill(actor, signal.SIGSTOP)
    run.handle.kill()
    assert run.end() == -9
    wait_until(lambda: not any(map(is_alive, [actor, *everybody])), "all to end")


@pytest.mark.slow
def test_a_process_waits_for_room_and_says_what_it_needs(make_ray, start_on, output, monkeypatch):
    monkeypatch.setattr("karvan.launch.engines.ray.engine._SAY_AFTER", 0.5)
    needs = dict.fromkeys(start_order(), Needs(cpus=0.1, resources={"scarce": 1.0}))
    engine = make_ray(needs=needs)
    first = start_on(engine, *SLEEP, index=0)
    first.first_line()
    second = start_on(engine, *SLEEP, index=1)
    [text] = wait_until(lambda: output.of("trainer-1"), "a line about room")
    assert text.startswith("Waiting for room for trainer-1: needs 0.1 CPU, 1 scarce; free in the cluster: ")
    assert "0 scarce of 1 scarce" in text
    assert second.handle.pid is None
    first.handle.kill()
    second.first_line()
    third = start_on(engine, *SLEEP, index=2)
    fourth = start_on(engine, *SLEEP, index=3)
    third.handle.stop()
    fourth.handle.kill()
    assert (third.end(), fourth.end()) == (-15, -9)  # they have never started
    assert second.handle.poll() is None


@pytest.mark.slow
def test_a_process_that_no_node_has_room_for_says_so(make_ray, start_on, output, monkeypatch):
    monkeypatch.setattr("karvan.launch.engines.ray.engine._SAY_AFTER", 0.1)
    run = start_on(make_ray(needs={Role.TRAINER: Needs(cpus=1.0, gpus=64.0)}), *SLEEP)
    [text] = wait_until(lambda: output.of("trainer-0"), "a line about room")
    assert "needs 1 CPU, 64 GPU" in text
    assert text.endswith("; no node is large enough.")
    run.handle.stop()
    assert run.end() == -15


@pytest.mark.slow
def test_files_of_the_token_travel_and_only_the_owner_can_read_them(make_ray, start_on, tmp_path):
    (tmp_path / "token").write_text("a secret of the job")
    (tmp_path / "token").chmod(0o600)
    run = start_on(
        make_ray(),
        "import os, stat",
        "path = os.environ['KARVAN_TOKEN_FILE']",
        "print(path, oct(stat.S_IMODE(os.stat(path).st_mode)), os.stat(path).st_uid)",
        "print(open(path).read(), open(path).read())",
        environment={"KARVAN_TOKEN_FILE": str(tmp_path / "token")},
    )
    assert run.end() == 0
    path, mode, owner = run.lines[0].split()
    assert path != str(tmp_path / "token")
    assert (mode, owner) == (oct(stat.S_IRUSR), str(os.geteuid()))
    assert run.lines[1] == "a secret of the job a secret of the job"
    wait_until(lambda: not os.path.exists(path), "the file to be gone")


@pytest.mark.slow
def test_checkpoints_in_a_folder_that_a_node_does_not_see_are_refused(make_ray, start_on, tmp_path):
    """The lease of the launcher is not in the folder, as on a node that has another folder of this name."""
    from karvan.owner import own

    owner = own(tmp_path / "saved")
    try:
        seen, another = str(tmp_path / "saved"), str(tmp_path / "another")
        environments = [{"KARVAN_OWNER": owner.id, "KARVAN_CHECKPOINTS": path} for path in (seen, another)]
        runs = [start_on(make_ray(), "", index=i, environment=each) for i, each in enumerate(environments)]
        assert [run.end() for run in runs] == [0, 2]
    finally:
        owner.release()
    [line] = runs[1].lines
    assert line.startswith("error: checkpoints expects a folder that all nodes see, such as one of a network")
    assert f"got {another}: node " in line


class Driver:
    """Another process with an engine, which runs one program and can be killed."""

    def __init__(self, address, unattended, *code):
        arguments = [address, str(unattended), "\n".join(code)]
        self.process = subprocess.Popen(
            [sys.executable, str(support_path("launch/ray_driver_program.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def record(self):
        """Of its process, and the ids of that and of those that it has started."""
        lines = iter(self.process.stdout.readline, "")
        found = json.loads(next(line for line in lines if line.startswith("{")))  # Ray prints, too
        return found, found.pop("pid"), found.pop("family")

    def kill(self):
        self.process.kill()
        self.process.communicate()


class Adopted(Run):
    """A process of an earlier master."""

    def __init__(self, engine, output, record, index=0):
        super().__init__(
            self, output, index=index, environment={"KARVAN_PROCESS": "driven", "KARVAN_REGISTRY": MOVED}
        )
        self.handle = engine.adopt(self.process, record, self.note)

    def start(self, process, ended):
        return None


@pytest.mark.slow
def test_a_later_master_takes_over_what_the_killed_one_has_started(make_ray, ray_address, output, tmp_path):
    code = (
        "import os, time",
        "print('first')",
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)",
        "print('last')",
        "raise SystemExit(7)",
    )
    driver = Driver(ray_address, 60, *code)
    record, pid, _ = driver.record()
    driver.kill()
    adopted = Adopted(make_ray(), output, record)
    wait_until(lambda: adopted.handle.pid == pid, "the same process")
    assert adopted.handle.record == record
    (tmp_path / "go").touch()
    assert adopted.end() == 7
    assert adopted.lines[-1] == "last"
    again = Adopted(make_ray(), output, record)
    assert again.end() == -9  # nobody knows its code any more


@pytest.mark.slow
def test_a_process_is_found_without_a_record_and_so_is_that_there_is_none(make_ray, ray_address, output):
    driver = Driver(ray_address, 60, "import time", "print('x')", *INTERRUPTED)
    _, pid, _ = driver.record()
    driver.kill()
    adopted = Adopted(make_ray(job=f"driven{driver.process.pid}"), output, {})
    wait_until(lambda: adopted.handle.pid == pid, "the same process")
    adopted.handle.interrupt()
    assert adopted.end() == 0
    assert adopted.lines[-1] == "KeyboardInterrupt()"
    assert Adopted(make_ray(job=f"driven{driver.process.pid}"), output, {}).end() == -9


@pytest.mark.slow
def test_the_code_of_a_process_that_ends_between_two_masters_is_kept(make_ray, ray_address, output):
    driver = Driver(ray_address, 60, "import os, time", "print(os.getpid())", "time.sleep(1)", "os._exit(9)")
    record, pid, _ = driver.record()
    driver.kill()
    wait_until(lambda: not is_alive(pid), "the end")
    adopted = Adopted(make_ray(), output, record)
    assert adopted.end() == 9
    assert adopted.lines in ([], [str(pid)])  # it was written by the first master, or not


@pytest.mark.slow
def test_a_process_whose_master_does_not_come_back_ends_unless_it_is_suspended(ray_address):
    drivers = [Driver(ray_address, 8.0, *FAMILY), Driver(ray_address, 8.0, "# suspend", *FAMILY)]
    families = [driver.record()[2] for driver in drivers]
    assert [len(family) for family in families] == [4, 4]
    wait_until(lambda: {state_of(pid) for pid in families[1]} == {"T"}, "all to be stopped")
    os.kill(drivers[1].process.pid, signal.SIGSTOP)  # as with Ctrl-Z, after its processes
    drivers[0].kill()
    wait_until(lambda: not any(map(is_alive, families[0])), "all to end")
    assert all(map(is_alive, families[1]))
    os.kill(drivers[1].process.pid, signal.SIGCONT)
    drivers[1].process.communicate("resume\n")
    wait_until(lambda: not any(map(is_alive, families[1])), "all to end")
