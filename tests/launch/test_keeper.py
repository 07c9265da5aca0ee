"""What a role has started ends with it and with the launcher, wherever it has gone."""

import os
import signal
import sys
import threading

import pytest
from launch_helpers import Launched, Running, is_alive, wait_until
from support_paths import support_path

from karvan.launch.engines.base import Process
from karvan.launch.engines.local import LocalEngine

FAMILY = "roles: {trainers: 1, parameter_servers: 1}"


class Families(Launched):
    """A launcher whose roles start children: one beside them, one in a session of its own, a daemon."""

    program = support_path("launch/launcher_program.py")

    def __init__(self, folder, text, **more):
        (folder / "family").touch()
        super().__init__(folder, text, **more)

    def members(self, role, count=1):
        event = self.wait_for("start", role, count)[-1]
        return [event["pid"], *event["family"]]


def test_all_that_roles_have_started_ends_when_the_launcher_is_killed(tmp_path):
    with Families(tmp_path, FAMILY) as job:
        everybody = job.members("trainer") + job.members("parameter-server")
        assert len(everybody) == 8
        assert all(map(is_alive, everybody))
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not any(map(is_alive, everybody)), "all to end")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_that_a_role_has_started_ends_when_the_role_does(tmp_path, number):
    with Families(tmp_path, FAMILY) as job:
        trainers, servers = job.members("trainer"), job.members("parameter-server")
        os.kill(trainers[0], number)
        again = job.members("trainer", 2)
        assert not any(map(is_alive, trainers))
        assert all(map(is_alive, [*servers, *again]))
        job.order("end-trainer", 0)
        job.output()
    assert job.process.returncode == 0
    assert not any(map(is_alive, [*servers, *again]))


def test_ctrl_z_stops_what_roles_have_started(tmp_path):
    from launch_helpers import state_of

    with Families(tmp_path, FAMILY) as job:
        everybody = job.members("trainer") + job.members("parameter-server")
        os.kill(job.process.pid, signal.SIGTSTP)
        wait_until(lambda: {state_of(pid) for pid in everybody} == {"T"}, "all to be stopped")
        os.kill(job.process.pid, signal.SIGCONT)
        wait_until(lambda: "T" not in {state_of(pid) for pid in everybody}, "all to continue")
        job.order("end-trainer", 0)
        job.output()
    assert job.process.returncode == 0


class Started:
    """A process that an engine runs."""

    def __init__(self, *code, environment=None):
        self.lines, self.codes, self.ended = [], [], threading.Event()
        command = (sys.executable, "-IS", "-c", "\n".join(code))
        process = Process("trainer", 0, command, environment or {})
        engine = LocalEngine(lambda name, line: self.lines.append(line))
        self.handle = engine.start(process, self._note)

    def _note(self, process, code):
        self.codes.append(code)
        self.ended.set()

    def end(self):
        assert self.ended.wait(60)
        return self.codes


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import os; os.kill(os.getpid(), 11)", -11),
    ],
)
def test_exit_codes_are_those_of_the_process(code, expected):
    started = Started(code)
    assert started.end() == [expected]
    assert started.handle.poll() == expected


def test_the_number_is_that_of_the_process_and_its_environment_is_whole():
    started = Started(
        "import os, signal",
        "name = os.environ['NAME']",
        "print(os.getpid(), os.getsid(0) == os.getpid(), ascii(name[:3]), len(name))",
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, sorted(os.listdir('/proc/self/fd')))",
        environment={"NAME": "ä\udcff" + "x" * 100_000},
    )
    assert started.end() == [0]
    first, second = started.lines
    assert first == f"{started.handle.pid} True '\\xe4\\udcffx' 100002"
    assert second.startswith("True")
    assert len(second.split("[")[1].split(",")) == 4  # stdin, stdout, stderr, and the folder that is listed


def test_a_process_whose_keeper_is_killed_ends_and_counts_as_killed():
    started = Started("import os, time", "print(os.getppid(), flush=True)", "time.sleep(1000)")
    wait_until(lambda: started.lines)
    pid = started.handle.pid
    os.kill(int(started.lines[0]), signal.SIGKILL)
    assert started.end() == [-9]
    wait_until(lambda: not is_alive(pid))


def test_orphans_are_not_left_as_zombies_while_the_process_lives():
    started = Started(
        "import os, sys, time",
        "child = os.fork()",
        "if not child:",
        "    grandchild = os.fork()",
        "    if grandchild: print(grandchild, flush=True)",
        "    os._exit(0)",
        "os.waitpid(child, 0)",
        "time.sleep(1000)",
    )
    wait_until(lambda: started.lines)
    orphan = started.lines[0]
    wait_until(lambda: not os.path.exists(f"/proc/{orphan}"), "the orphan to be forgotten")
    started.handle.kill()
    assert started.end() == [-9]


def test_a_keeper_takes_little_memory(tmp_path):
    with Running(tmp_path, {}) as job:
        [trainer] = job.wait_for("start", "trainer")
        with open(f"/proc/{trainer['pid']}/stat") as stat:
            keeper = stat.read().rpartition(")")[2].split()[1]
        with open(f"/proc/{keeper}/smaps_rollup") as file:
            sizes = dict(line.split()[:2] for line in file if line.split()[1].isdigit())
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    own = int(sizes["Private_Dirty:"]) + int(sizes["Private_Clean:"])
    assert own < 12_000  # kB
