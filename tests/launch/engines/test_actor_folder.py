"""The temporary folders of actors: nothing is left of those that were killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import wait_until
from processes import is_alive

from karvan.launch.engines import keeper
from karvan.launch.engines.ray.actor import make_folder, remove_abandoned

ACTOR = """
import sys, threading
from karvan.job.roles import Role
from karvan.launch.engines.base import Process
from karvan.launch.engines.local import LocalEngine
from karvan.launch.engines.ray.actor import make_folder
engine = LocalEngine(lambda name, line: print(line, flush=True), make_folder(), away=0.0, temporary=True)
code = "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(1000)"
engine.start(Process(Role.TRAINER, 0, (sys.executable, "-c", code), {}), lambda process, code: None)
threading.Event().wait()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield tmp_path
    remove_abandoned()


class Actor:
    """A process that owns another one, like an actor."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, text=True)
        self.keeper, self.role = map(int, self.process.stdout.readline().split())

    def kill(self):
        self.process.kill()
        self.process.communicate()


def test_the_keeper_removes_the_folder_of_an_actor_that_was_killed(temporary):
    actor = Actor()
    [folder] = temporary.iterdir()
    remove_abandoned()
    assert folder.exists()  # it is not abandoned
    actor.kill()
    wait_until(lambda: not folder.exists(), "the keeper to remove it")
    wait_until(lambda: not is_alive(actor.role), "the process to end")


def test_the_next_actor_removes_the_folder_if_the_keeper_was_killed_too(temporary):
    actor = Actor()
    os.kill(actor.keeper, signal.SIGSTOP)
    actor.kill()
    [folder] = temporary.iterdir()
    remove_abandoned()
    assert folder.exists()  # its keeper lives
    os.kill(actor.keeper, signal.SIGKILL)
    wait_until(lambda: not is_alive(actor.role), "the process to end")
    remove_abandoned()
    assert list(temporary.iterdir()) == []


def test_a_keeper_whose_master_dies_before_it_has_said_what_to_run_leaves_nothing(temporary):
    folder = make_folder()
    (place := folder / "processes" / "trainer-0-1").mkdir(parents=True)
    (place / "alive").touch()
    command = [sys.executable, "-IS", keeper.__file__, str(place), "0", str(folder)]
    done = subprocess.run(command, input="000000ff{", text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert not folder.exists()


def test_the_folder_of_another_kind_stays(temporary):
    (other := Path(temporary, "karvan-role-link")).symlink_to(temporary)
    (temporary / "mine").mkdir()
    remove_abandoned()
    assert other.is_symlink()
    assert (temporary / "mine").exists()
    other.unlink()
