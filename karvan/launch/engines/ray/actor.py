"""`RoleActor`: owns the process of a role, on a node of a Ray cluster.

The actor starts the process with the local engine of its node, in a temporary folder. The process's keeper
ends it, with all that it has started, as soon as the actor's worker process dies, and removes the folder.
A master talks to the actor:

    describe     where the actor is; the answer says that there was room for it
    start        run a process; repeated by a master that adopts the actor, which has one, or none yet
    take         a batch of the process's lines; waits until there are some, and ends with its exit code
    request      stop, interrupt, kill, dump_stacks, suspend or resume

A master that adopts the actor may be on another machine than the last one. The actor then leaves its address
in the *master address file* of the process, which finds the master there (`karvan/job/address.py`).

**The master dies**: nobody takes lines any more. After `unattended` seconds the actor kills the process and
ends, with its placement group, so that nothing is left of a job whose master does not come back; until then
another master can adopt it. **The actor dies**, or its node: calls in flight fail at the master, which counts
the process as killed.

Methods run in threads: `take` waits in some, `request` in one, so that requests keep their order.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group, remove_placement_group

from karvan.clock import clock
from karvan.launch.engines.local import LocalEngine, keeper_lives

if TYPE_CHECKING:
    from karvan.launch.engines.base import Process
    from karvan.launch.engines.local import LocalHandle
    from karvan.launch.engines.ray.order import Order


# `OutputBuffer`: the lines of a process until a master has taken them.
#
# Lines are numbered. `take(first)` waits for lines from that number on, and drops those before it: the
# master has written them. A master that dies before it has said so leaves them to the next one, which gets
# them again. A buffer has a name, because an actor that Ray restarts has another one, whose numbers begin
# again.


_MOST_BYTES = 16 << 20  # that wait for a master
_BATCH = 64 << 10  # bytes; Ray passes results of this size on without its object store

_GATHER = 0.02  # seconds; a call for each line would take longer than the lines


@dataclass(frozen=True)
class LogLines:
    """Some lines, the number of the line after them, and the exit code once there are no more."""

    lines: list[str]
    following: int
    code: int | None
    buffer: str = ""


class OutputBuffer:
    """Lines of a process. If they are not taken and too many, `append` waits: further lines are in the log of
    the process until then, in two files of limited size.
    """

    def __init__(self, *, most: int = _MOST_BYTES) -> None:
        self.name = secrets.token_hex(4)
        self._most = most
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._first = 0  # the number of the first line
        self._bytes = 0
        self._code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._code is not None

    def append(self, line: str) -> None:
        """Add a line."""
        with self._changed:
            while self._bytes > self._most:
                self._changed.wait()
            self._lines.append(line)
            self._bytes += len(line) + 1
            if len(self._lines) == 1 or self._bytes > _BATCH:
                self._changed.notify_all()

    def end(self, code: int) -> None:
        """The process has ended, after its last line."""
        with self._changed:
            self._code = code
            self._changed.notify_all()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the process has ended, at most some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._code is not None, seconds)

    def take(self, first: int, seconds: float, buffer: str = "") -> LogLines:
        """Lines from number `first` of a buffer on, or none if there are none within some seconds."""
        if buffer and buffer != self.name:
            first = 0
        with self._changed:
            while self._lines and self._first < first:
                self._drop()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._code is not None, seconds)
            self._changed.wait_for(lambda: self._bytes > _BATCH or self._code is not None, _GATHER)
            lines: list[str] = []
            size = 0
            for line in self._lines:
                size += len(line) + 1
                if lines and size > _BATCH:
                    break
                lines.append(line)
            following = self._first + len(lines)
            return LogLines(lines, following, None if self._lines else self._code, self.name)

    def _drop(self) -> None:
        self._bytes -= len(self._lines.popleft()) + 1
        self._first += 1


# The temporary folder of an actor, with the files of its keeper, and what others have left behind.
#
# An actor holds a lock on its folder as long as its process lives. Usually it removes the folder itself; if
# it is killed, its keeper does. If both are killed, such as with all processes of a machine, the folder is
# left: each actor that starts removes those whose actor and keeper are gone.


_PREFIX = "karvan-role-"


def make_folder() -> Path:
    """Make the folder of this process; it is locked as long as the process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # otherwise another actor took it for an abandoned one before it was locked
            return folder
        os.close(lock)


def remove_abandoned() -> None:
    """Remove the folders of this user on this machine whose actor and keeper are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not any(keeper_lives({"folder": path}) for path in folder.glob("processes/*")):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


Prepare = Callable[["Process", str, Path], "Process"]

TAKE_SECONDS = 10.0  # that a call of `take` waits at most
GROUPS = {"output": 4, "control": 1}  # threads
# Ray would kill the keeper first, which could then not end what the process has started.
SETTINGS = {"RAY_kill_child_processes_on_worker_exit": "false"}
SUSPENDED_AT_MOST = 3600.0  # seconds without a master, of a process that a master has suspended


@dataclass(frozen=True)
class Location:
    """Where an actor is."""

    node: str  # Ray's id
    address: str


@dataclass(frozen=True)
class Started:
    """A process that was started, or why it was not."""

    pid: int | None
    refusal: str = ""


class RoleActor:
    """Runs one process."""

    def __init__(self, unattended: float) -> None:
        self._unattended = unattended
        self._lock = threading.Lock()
        self._output = OutputBuffer()
        self._handle: LocalHandle | None = None
        self._suspended = False
        self._takers = 0
        self._attended = clock.now()
        self._group = get_current_placement_group()
        threading.Thread(target=self._end_unattended, name="unattended", daemon=True).start()

    def describe(self) -> Location:
        """Where it is."""
        self._attended = clock.now()
        return location()

    def start(self, order: Order) -> Started:
        """Start a process, unless one was started before, which then learns where the master is now."""
        self._attended = clock.now()
        with self._lock:
            if self._handle is None:
                if refusal := order.refusal(location().address):
                    return Started(None, refusal)
                self._handle = run(order, self._output)
            else:
                self._handle.tell_master(order.process)
            return Started(self._handle.pid)

    def take(self, first: int, buffer: str = "") -> LogLines:
        """Lines of the process from number `first` of a buffer on."""
        with self._lock:
            self._takers += 1
        try:
            return self._output.take(first, TAKE_SECONDS, buffer)
        finally:
            with self._lock:
                self._takers -= 1
            self._attended = clock.now()

    def request(self, name: str) -> None:
        """One of the methods of a handle."""
        if name in ("suspend", "resume"):
            self._suspended = name == "suspend"
        if self._handle is not None:
            getattr(self._handle, name)()

    def unattended(self) -> float:
        """Seconds since a master has taken lines; 0 if one waits for some."""
        with self._lock:
            return 0.0 if self._takers else clock.now() - self._attended

    def _end_unattended(self) -> None:
        wake = threading.Event()
        while True:
            wake.wait(min(self._unattended / 4, 1.0))
            if self.unattended() > (SUSPENDED_AT_MOST if self._suspended else self._unattended):
                break
        with self._lock:
            if self._handle is not None:
                self._handle.kill()
                self._output.wait_for_end(TAKE_SECONDS)  # its files are removed then
        if self._group is not None:  # nobody else will remove it
            with suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)
        os._exit(1)


def location() -> Location:
    """Where this process runs."""
    return Location(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def run(
    order: Order,
    output: OutputBuffer,
    prepare: Prepare = lambda process, folder, files: process,
    **settings: Any,
) -> LocalHandle:
    """Start a process on this node; its lines and its exit code go to the buffer.

    prepare: makes the process what it is to be here, from the folder in which it runs and the folder of its
    temporary files. settings: of the local engine.
    """
    process, folder = order.on_node(location().address)
    os.chdir(folder)
    if order.own_threads:
        os.environ.pop("OMP_NUM_THREADS", None)  # of Ray: the number of CPUs that the actor has
    for name in SETTINGS:
        os.environ.pop(name, None)
    with suppress(PermissionError):  # Ray's workers give way to others
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    remove_abandoned()
    files = make_folder()
    settings = {"away": 0.0, "temporary": True, **settings}
    engine = LocalEngine(lambda name, line: output.append(line), files, **settings)

    def ended(process: Process, code: int) -> None:
        shutil.rmtree(files, ignore_errors=True)
        output.end(code)

    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # Ray blocks it in its processes
    try:
        return engine.start(prepare(process, folder, files), ended)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
