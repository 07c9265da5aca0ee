"""Launched jobs whose master is paused, and that are suspended by Ctrl-Z at a terminal."""

import os
import pty
import select
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
from chaos_helpers import LaunchedJob, mutual_tls
from processes import state_of

ROLES = ("parameter-server", "embedding-worker", "loader", "trainer")


def extra_of(folder, secured):
    return mutual_tls(folder) if secured else ""


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual TLS"])
def test_a_master_that_is_paused_for_long_kills_nobody(tmp_path, secured):
    extra = f"{extra_of(tmp_path, secured)}logs: {tmp_path / 'logs'}\n"
    with LaunchedJob(tmp_path, "hybrid", 4, loaders=1, workers=1, pause=1.0, extra=extra) as job:
        job.wait_for_step(2)
        time.sleep(max(0.0, 62 - job.age()))  # until processes are judged by their heartbeats
        before = {role: job.pids(role) for role in ROLES}
        [master] = job.pids("master")
        os.kill(master, signal.SIGSTOP)
        time.sleep(25)  # heartbeats count as lost after 10
        os.kill(master, signal.SIGCONT)
        job.wait_for_line("was asleep for")
        seen = job.step()
        job.wait_for_step(seen + 5)
        assert {role: job.pids(role) for role in ROLES} == before
        job.finish()
        assert "does not answer" not in job.log.read_text()
        np.testing.assert_array_equal(job.records()[0], 1)


class Terminal:
    """A shell with job control at a terminal of its own."""

    def __init__(self):
        self.shell, self._terminal = pty.fork()
        if self.shell == 0:
            os.environ["PS1"] = "ready> "
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
        self.seen = ""

    def type(self, text):
        os.write(self._terminal, text.encode())

    def read(self):
        while select.select([self._terminal], [], [], 0.05)[0]:
            try:
                self.seen += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError:  # the shell has ended
                return

    def wait_for(self, text, seconds=60.0):
        until = time.monotonic() + seconds
        while text not in self.seen:
            self.read()
            assert time.monotonic() < until, f"no {text!r} in:\n{self.seen}"

    def close(self):
        os.close(self._terminal)
        with suppress(ProcessLookupError):
            os.kill(self.shell, signal.SIGKILL)
        os.waitpid(self.shell, 0)


class AtTerminal(LaunchedJob):
    """A job that a shell at a terminal runs in the foreground."""

    def start(self, command):
        self.terminal = Terminal()
        self.log = self.folder / "logs" / "launcher.log"
        self.terminal.type(f"{' '.join(command)} --set logs={self.folder / 'logs'}\n")

    def __exit__(self, *exception):
        self.terminal.type("\x03")
        self.terminal.close()


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual TLS"])
@pytest.mark.parametrize("trainers", [1, 2])
def test_ctrl_z_suspends_a_job_and_fg_resumes_it(tmp_path, trainers, secured):
    job = AtTerminal(
        *(tmp_path, "hybrid", 4), trainers=trainers, loaders=1, workers=1, extra=extra_of(tmp_path, secured)
    )
    with job:
        job.wait_for_step(5)
        before = {role: job.pids(role) for role in ROLES}
        job.terminal.type("\x1a")
        job.terminal.wait_for("Suspended: all processes of the job are stopped")
        job.terminal.wait_for("Stopped")  # the shell has its terminal again
        until = time.monotonic() + 60
        while {state_of(pid) for pids in before.values() for pid in pids} != {"T"}:  # keepers take a moment
            assert time.monotonic() < until, job.terminal.seen
            time.sleep(0.05)
        step = job.step()
        time.sleep(15)  # longer than silence on a connection, and than lost heartbeats
        assert job.step() == step
        job.terminal.type("fg\n")
        job.terminal.wait_for("Resumed: all processes continue")
        job.wait_for_step(step + 5)
        assert {role: job.pids(role) for role in ROLES} == before
        (tmp_path / "notes" / "hurry").touch()
        job.terminal.type("echo ended-$((40 + 2))\n")
        job.terminal.wait_for("ended-42", 120)
        assert "does not answer" not in job.log.read_text()
        assert "Generation 1" not in job.log.read_text()
        times = job.records()[0]
        if trainers == 1:
            np.testing.assert_array_equal(times, 1)
        assert times.all()
