"""What a role has started ends with it and with the launcher, wherever it has gone."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from launch_helpers import Launched, Running, wait_until
from processes import is_alive, parent_of, state_of
from small_disk import small_disk

from karvan.launch.engines.base import Process
from karvan.launch.engines.local import LocalEngine

FAMILY = "roles: {trainers: 1, parameter_servers: 1}"


class Families(Launched):
    """A launcher whose roles start children: one beside them, one in a session of its own, a daemon."""

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
        remain = {"job.json", "outcome.json", "logs", "lock"}
        wait_until(
            lambda: {each.name for each in job.run_folder.iterdir()} == remain, "the folder to be clean"
        )


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


def test_all_that_a_role_has_started_ends_when_its_keeper_is_killed(tmp_path):
    with Families(tmp_path, FAMILY) as job:
        trainers, servers = job.members("trainer"), job.members("parameter-server")
        os.kill(parent_of(trainers[0]), signal.SIGKILL)
        again = job.members("trainer", 2)
        assert not any(map(is_alive, trainers))
        assert all(map(is_alive, [*servers, *again]))
        job.order("end-trainer", 0)
        job.output()
    assert job.process.returncode == 0


def test_ctrl_z_stops_what_roles_have_started(tmp_path):
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

    def __init__(self, folder, *code, environment=None, away=60.0):
        self.lines, self.codes, self.ended = [], [], threading.Event()
        command = (sys.executable, "-IS", "-c", "\n".join(code))
        self.process = Process("trainer", 0, command, environment or {})
        self.engine = LocalEngine(lambda name, line: self.lines.append(line), folder, away=away)
        self.handle = self.engine.start(self.process, self._note)

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
def test_exit_codes_are_those_of_the_process(tmp_path, code, expected):
    started = Started(tmp_path, code)
    assert started.end() == [expected]
    assert started.handle.poll() == expected


def test_the_number_is_that_of_the_process_and_its_environment_is_whole(tmp_path):
    started = Started(
        tmp_path,
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


def test_a_process_whose_keeper_is_killed_ends_and_counts_as_killed(tmp_path):
    started = Started(tmp_path, "import os, time", "print(os.getppid(), flush=True)", "time.sleep(1000)")
    wait_until(lambda: started.lines)
    pid = started.handle.pid
    os.kill(int(started.lines[0]), signal.SIGKILL)
    assert started.end() == [-9]
    wait_until(lambda: not is_alive(pid))


def test_orphans_are_not_left_as_zombies_while_the_process_lives(tmp_path):
    started = Started(
        tmp_path,
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
    with Running(tmp_path, {}, forked=False) as job:
        [trainer] = job.wait_for("start", "trainer")
        with open(f"/proc/{parent_of(trainer['pid'])}/smaps_rollup") as file:
            sizes = dict(line.split()[:2] for line in file if line.split()[1].isdigit())
        job.order("end-trainer", 0)
        assert job.outcome().code == 0
    own = int(sizes["Private_Dirty:"]) + int(sizes["Private_Clean:"])
    assert own < 12_000  # kB


WAITING = ("import time", "print('here', flush=True)", "time.sleep(1000)")


def test_a_process_outlives_the_engine_that_started_it_and_is_adopted(tmp_path):
    script = f"""
import sys, time
from karvan.launch.engines.base import Process
from karvan.launch.engines.local import LocalEngine
from pathlib import Path
process = Process("trainer", 0, (sys.executable, "-IS", "-c", {chr(10).join(WAITING)!r}), {{}})
handle = LocalEngine(lambda name, line: None, Path({str(tmp_path)!r})).start(process, lambda *_: None)
print(handle.pid, handle.record["folder"], flush=True)
time.sleep(1000)
"""
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid, folder = starter.stdout.readline().split()
    starter.kill()
    starter.communicate()
    adopter = Adopter(tmp_path, {"folder": folder})
    assert adopter.handle.pid == int(pid)
    assert is_alive(int(pid))
    adopter.handle.stop()
    assert adopter.end() == [-15]


def test_the_exit_code_and_the_lines_of_a_process_that_ended_alone_are_known_later(tmp_path):
    started = Started(tmp_path, "print('one')", "print('two', end='')", "raise SystemExit(7)")
    assert started.end() == [7]
    (tmp_path / "processes").rename(tmp_path / "processes-before")  # as if nobody had seen its end
    folder = next((tmp_path / "processes-before").iterdir())
    (folder / "shown").unlink()
    adopter = Adopter(tmp_path, {"folder": str(folder)})
    assert adopter.end() == [7]
    assert adopter.lines == ["one", "two"]


def test_a_process_that_was_never_started_counts_as_killed(tmp_path):
    assert Adopter(tmp_path, {}).end() == [-9]


def test_a_process_without_a_master_ends_after_a_while(tmp_path):
    script = f"""
import subprocess
import sys
from karvan.launch.engines.base import Process
from karvan.launch.engines.local import LocalEngine
from pathlib import Path
process = Process("trainer", 0, (sys.executable, "-IS", "-c", {chr(10).join(WAITING)!r}), {{}})
engine = LocalEngine(lambda name, line: None, Path({str(tmp_path)!r}), away=0.5)
print(engine.start(process, lambda *_: None).pid, flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    wait_until(lambda: not is_alive(int(ran.stdout)))
    wait_until(lambda: not (tmp_path / "processes").exists(), "its files to be removed")


def test_a_log_is_cut_in_files_and_no_line_is_lost_or_doubled(tmp_path, monkeypatch):
    monkeypatch.setattr("karvan.launch.engines.keeper.LOG_BYTES", 10_000)
    started = Started(
        tmp_path,
        "import time",
        "for number in range(2000):",
        "    print(number, flush=True)",
        "    if number % 100 == 0: time.sleep(0.05)",
    )
    assert started.end() == [0]
    assert started.lines == [str(number) for number in range(2000)]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert set(sizes) == {"trainer-0.log"} or max(sizes.values()) <= 10_000


def test_a_full_disk_costs_lines_of_the_log_but_not_the_process(tmp_path):
    with small_disk(tmp_path / "disk", "2m") as small:
        disk = small.folder
        started = Started(
            disk,
            "import os, time",
            "for number in range(100): print('x' * 100_000, flush=True)",
            f"open({str(tmp_path / 'done')!r}, 'w').close()",
            f"while not os.path.exists({str(tmp_path / 'more')!r}): time.sleep(0.01)",
            "print('y', flush=True)",
        )
        wait_until((tmp_path / "done").exists)
        assert os.statvfs(disk).f_bavail == 0
        for path in (disk / "logs").iterdir():
            os.truncate(path, 0)
        (tmp_path / "more").touch()
        assert started.end() == [0]
        log = (disk / "logs" / "trainer-0.log").read_text()
        assert "bytes of output are lost: the log could not be written]" in log
        assert log.endswith("y\n")


class Adopter(Started):
    """An engine that adopts a process by its record."""

    def __init__(self, folder, record):
        self.lines, self.codes, self.ended = [], [], threading.Event()
        self.process = Process("trainer", 0, (), {"KARVAN_PROCESS": "unknown"})
        self.engine = LocalEngine(lambda name, line: self.lines.append(line), folder)
        self.handle = self.engine.adopt(self.process, record, self._note)
