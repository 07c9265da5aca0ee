"""Processes that engines run, and what is known of them."""

import fcntl
import importlib.util
import os
import secrets
import subprocess
import sys
import threading
from contextlib import contextmanager

from launch_helpers import PATIENCE, wait_until
from processes import is_alive, kill
from support_paths import support_path

from karvan.job.roles import Role
from karvan.launch.engines.base import Process

# Ray is not imported before a test has set its token.
HAS_RAY = importlib.util.find_spec("ray") is not None
NEEDS_RAY = 'tests of the Ray engine need: pip install "karvan[ray]"'


class Output:
    """What an engine writes, by process."""

    def __init__(self):
        self.all = []

    def write(self, name, line):
        self.all.append((name, line))

    def of(self, name):
        return [line for there, line in self.all if there == name]


class Run:
    """A process that an engine runs; `code` are lines of a Python program."""

    def __init__(self, engine, output, *code, role=Role.TRAINER, index=0, environment=None, command=None):
        self._output = output
        self.codes, self.ended = [], threading.Event()
        command = command or (sys.executable, "-uc", "\n".join(code))
        self.process = Process(role, index, command, environment or {})
        self.lines_at_end = None
        self.handle = engine.start(self.process, self.note)

    @property
    def lines(self):
        """Its own lines; the engine says when it waits for room, which a busy machine may have it do."""
        return [line for line in self._output.of(self.process.name) if not line.startswith("Waiting for")]

    def note(self, process, code):
        assert process is self.process
        self.lines_at_end = len(self.lines)
        self.codes.append(code)
        self.ended.set()

    def first_line(self):
        return wait_until(lambda: self.lines, "the first line")[0]

    def end(self):
        """Wait for its end, after which nothing may come; its code."""
        assert self.ended.wait(PATIENCE)
        assert len(self.lines) == self.lines_at_end
        [code] = self.codes
        return code


class SharedCluster:
    """A Ray cluster that all processes of a test run share."""

    def __init__(self, folder):
        self._folder = folder
        self.address = (folder / "address").read_text()
        self.token = folder / "token"

    def add_nodes(self, resource, count):
        """Add nodes with one of a resource each; the process ids of their raylets."""
        names = [f"{resource}-{secrets.token_hex(4)}" for _ in range(count)]
        for name in names:
            (self._folder / "orders" / f"add-{name}").touch()
        found = [self._folder / "nodes" / name for name in names]
        wait_until(lambda: all(path.exists() for path in found), "nodes to be added", 3 * PATIENCE)
        return [int(path.read_text()) for path in found]

    def fill_head(self):
        """Have the actors of jobs be on other nodes than the first one."""
        (order := self._folder / "orders" / "fill-head").touch()
        wait_until(lambda: not order.exists(), "the first node to be full")


class JobNodes:
    """Nodes of a cluster for one test: they alone have some resource."""

    def __init__(self, cluster, resource, count):
        self._cluster = cluster
        self.resource = resource
        self.raylets = []
        self.add(count)

    def add(self, count=1):
        """Add nodes, for those that were killed."""
        self.raylets += self._cluster.add_nodes(self.resource, count)

    def living(self):
        """The raylets of those that run."""
        return [raylet for raylet in self.raylets if is_alive(raylet)]

    def close(self):
        """Kill those that are left."""
        for raylet in self.living():
            kill(raylet)


def token_settings(path):
    """The environment of a cluster that has this token, and of programs that use it."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


@contextmanager
def shared_cluster(folder):
    """The cluster of a test run, whose files are in this folder."""
    for name in ("users", "orders", "nodes"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (user := folder / "users" / str(os.getpid())).touch()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "address").exists():
            (folder / "token").write_text(secrets.token_hex(32))  # Ray would leave one in the home folder
            (folder / "token").chmod(0o600)
            program = [sys.executable, str(support_path("launch/ray_cluster_program.py")), str(folder)]
            with open(folder / "log", "w") as log:
                environment = {**os.environ, **token_settings(folder / "token")}
                subprocess.Popen(program, stdout=log, stderr=log, start_new_session=True, env=environment)
            wait_until((folder / "address").exists, "the Ray cluster", 3 * PATIENCE)
    try:
        yield SharedCluster(folder)
    finally:
        user.unlink()
