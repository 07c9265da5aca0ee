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
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group, remove_placement_group

from karvan.clock import clock
from karvan.job.address import is_everywhere
from karvan.job.environment import LAUNCHED, names, variable
from karvan.launch.engines.base import Process
from karvan.launch.engines.local import LocalEngine, keeper_lives
from karvan.launch.role_programs import interface_settings
from karvan.owner import FILE, OwnerError, read_lease
from karvan.system_limits import forbid_core_dumps

if TYPE_CHECKING:
    from karvan.launch.engines.local import LocalHandle


# `Order`: all that a node has to know in order to run a process, and how it becomes the node's own.
#
# The launcher's machine and the node may differ in: the Python that runs, the folder in which the job was
# launched (`working_folder`), the files of the token and TLS, the address by which others reach the process.

# Files that exist in memory alone, for secrets that have travelled to another node.
#
# Such a file belongs to the process that made it: others of the same user open it by a path below /proc, with
# mode 0400. It is on no disk, and is gone with the process, also after kill -9.


def private_file(name: str, content: bytes) -> str:
    """Make a file; returns its path, which is valid as long as this process lives."""
    forbid_core_dumps()
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as writer:
        writer.write(content)
    os.fchmod(file, 0o400)
    return f"/proc/{os.getpid()}/fd/{file}"


_HOST, _ADVERTISE = variable("host"), variable("advertise")
_CHECKPOINTS, _OWNER = variable("checkpoints"), variable("owner")
_SECRETS = tuple(variable(name) for name in ("token_file", "tls_cert", "tls_key", "tls_ca"))
# Those of users, which processes inherit locally; the address of this machine is not that of another one.
_INHERITED = tuple(name for name in map(variable, names()) if name not in LAUNCHED and name != _ADVERTISE)
_VISIBLE_WITHIN = 5.0  # seconds; network file systems show new files a little later


@dataclass(frozen=True)
class Order:
    """A process, and what of the launcher's machine has to be replaced on the node.

    programs: files in the folder by which a node knows that it sees the same one. network: whether others
    reach the process over the network, and not by loopback. own_threads: whether the process chooses its
    number of threads itself, as it does locally; otherwise it is that of its CPUs.
    """

    process: Process
    secrets: Mapping[str, bytes]  # by variable: the content of the file that it names
    python: str
    version: str
    folder: str
    programs: tuple[str, ...]
    folder_identity: tuple[int, ...]
    network: bool
    own_threads: bool

    @classmethod
    def of(
        cls, process: Process, *, network: bool, own_threads: bool, programs: tuple[str, ...] = ()
    ) -> Order:
        """An order to run a process as if it ran here, in this folder; programs: besides its own."""
        folder = os.getcwd()
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment = {**inherited, **process.environment}
        if process.role.is_rank:  # each has its own devices
            environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        host = process.environment.get(_HOST, "")
        for name, value in interface_settings(host).items() if network and host else ():
            if environment.get(name) == value:  # of this machine, and not set by the job
                del environment[name]
        parts = (*process.command, *programs)
        programs = tuple(part for part in parts if part.endswith((".py", ".yaml", ".yml")))
        secrets = {name: Path(environment[name]).read_bytes() for name in _SECRETS if environment.get(name)}
        return cls(
            replace(process, environment=environment),
            secrets,
            sys.executable,
            _version(),
            folder,
            programs,
            identity_of(Path(folder), programs),
            network,
            own_threads,
        )

    def refusal(self, address: str) -> str:
        """Why this node, which has this address, cannot run the process; "" if it can."""
        if self.version != _version():
            return (
                f"node {address} has Karvan {_version()}, but the job was launched with {self.version}. "
                "Install the same version on all nodes."
            )
        folder, owner = self._checkpoints(), self.process.environment.get(_OWNER, "")
        if folder is not None and owner and not _is_owned(folder / FILE, owner):
            return (
                "checkpoints expects a folder that all nodes see, such as one of a network file system, "
                f"got {folder}: node {address} does not see it, or sees another folder there."
            )
        return ""

    def on_node(self, address: str) -> tuple[Process, str]:
        """The process as it runs on this node, which has this address, and the folder in which it runs."""
        environment = dict(self.process.environment)
        for name, content in self.secrets.items():
            environment[name] = private_file(name.lower(), content)
        if self.network:
            if not is_everywhere(environment.get(_HOST, "")):
                environment[_HOST] = address
            environment.setdefault(_ADVERTISE, address)
            if self.process.role.is_rank:
                environment = {**interface_settings(address), **environment}
        folder = self.folder if self._sees_folder() else os.getcwd()
        if (checkpoints := self._checkpoints()) is not None and folder != self.folder:
            environment[_CHECKPOINTS] = str(checkpoints)
        command = self.command_on_node(self.process.command, folder)
        return replace(self.process, command=command, environment=environment), folder

    def command_on_node(self, command: Iterable[str], folder: str) -> tuple[str, ...]:
        """A command of the launcher's machine as it is on this node, where it runs in a folder."""
        return tuple(self._on_node(part, folder) for part in command)

    def _on_node(self, part: str, folder: str) -> str:
        if part == self.python:
            return sys.executable
        if folder != self.folder and part.startswith(f"{self.folder}{os.sep}"):
            copy = os.path.join(folder, os.path.relpath(part, self.folder))
            return copy if os.path.exists(copy) else part
        return part

    def _sees_folder(self) -> bool:
        """Whether the folder of this name is the launcher's, and not another one of the same name."""
        try:
            return identity_of(Path(self.folder), self.programs) == self.folder_identity
        except OSError:
            return False

    def _checkpoints(self) -> Path | None:
        path = self.process.environment.get(_CHECKPOINTS, "")
        return None if not path or "://" in path else Path(self.folder, path)


def identity_of(folder: Path, command: tuple[str, ...]) -> tuple[int, ...]:
    """Numbers by which machines that see the same folder know that it is the same."""
    numbers = [folder.stat().st_ino]
    for part in command:
        if (folder / part).is_file():
            status = (folder / part).stat()
            numbers += [status.st_size, status.st_mtime_ns]
    return tuple(numbers)


def _is_owned(path: Path, owner: str) -> bool:
    until = time.monotonic() + _VISIBLE_WITHIN
    while True:
        try:
            record = read_lease(path)
        except (OSError, OwnerError):
            record = None
        if record is not None and record.id == owner:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def _version() -> str:
    import karvan

    return karvan.__version__


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
            self._handle.ask(name)

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
