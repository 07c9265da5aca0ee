"""The local engine: processes on this machine.

Each process has its own session. So Ctrl-C on the terminal reaches only the launcher, which stops the others
in order. Each process has a keeper (`keeper.py`), which passes a kill on to all that the process has started,
writes its log, and waits for another master if this one dies. If the keeper itself is killed, the engine ends
all that the process has started.

A process has a folder, `processes/ROLE-INDEX-ID` in the folder of the job, with the files of its keeper. The
keeper holds a lock there while it lives: waiting for the lock is waiting for its end. Its master address file
is there, too (`karvan/job/address.py`). Logs are in `logs`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from typing_extensions import override

from karvan.job.address import change_master_address, make_master_address
from karvan.job.environment import LAUNCHED, NOT_PASSED_ON, TORCH_NAMES, variable
from karvan.job.roles import Role
from karvan.launch.engines import keeper
from karvan.launch.engines.base import Ended, Handle, Process
from karvan.launch.engines.keeper import OLDER_LOGS

# Follows log files that keepers write, and passes their lines on.

_LONGEST_LINE = 1 << 16  # bytes; longer lines are cut, so that no process fills the master's memory
_CHUNK = 1 << 18
_PAUSES = 0.01, 0.1  # seconds between two looks at all files: after output, and at most


class FollowedLog:
    """The lines of a log file, from a position on, each passed to `write` once.

    The position is stored in the file `shown`: another master continues there. Lines that were passed on just
    before a master died may come twice, but none is lost. Without such a file, all lines that the log still
    has are passed on, or the last ones (tail).
    """

    def __init__(
        self,
        path: Path,
        write: Callable[[str], None],
        shown: Path | None = None,
        tail: int | None = None,
    ) -> None:
        self._path = path
        older = (path.with_name(f"{path.name}.{number + 1}") for number in range(OLDER_LOGS))
        self._files = [path, *older]  # from the newest
        self._write = write
        self._lock = threading.Lock()
        self._shown = -1
        if shown is not None:
            self._shown = os.open(shown, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closed = False
        self._rest = b""
        self._file, self._offset = self._open_where_shown() if tail is None else self._open_tail(tail)

    @staticmethod
    def begin(path: Path, shown: Path) -> None:
        """Store that everything which is in the log now was shown."""
        path.touch(0o600)
        status = path.stat()
        shown.write_bytes(_packed(status.st_ino, status.st_size))

    def read(self, *, last: bool = False) -> bool:
        """Pass on what is new; whether there was anything. last: also a line without an end."""
        with self._lock:
            if self._closed:
                return False
            data = self._read_file()
            while (following := self._open_following()) is not None:
                data = self._read_file() or data  # written before the file was renamed
                os.close(self._file)
                # What is left of a line that is too long for a file belongs to its rest in the next one.
                self._file, self._offset = following, -len(self._rest)
                data = self._read_file() or data
            if last and self._rest:
                self._pass_on(self._rest)
                self._rest = b""
            if self._shown >= 0 and (data or last):
                os.pwrite(self._shown, _packed(os.fstat(self._file).st_ino, max(0, self._offset)), 0)
            return data

    def close(self) -> None:
        """Release the files."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)
                if self._shown >= 0:
                    os.close(self._shown)

    def _open_where_shown(self) -> tuple[int, int]:
        stored = os.pread(self._shown, 64, 0).split() if self._shown >= 0 else []
        inode, offset = (int(stored[0]), int(stored[1])) if len(stored) == 2 else (0, 0)
        file = self._open_newest()
        for older in self._files[1:] if inode or self._shown < 0 else []:
            if os.fstat(file).st_ino == inode:
                break
            with suppress(FileNotFoundError):
                next_older = os.open(older, os.O_RDONLY | os.O_CLOEXEC)
                os.close(file)
                file = next_older
        return file, offset if os.fstat(file).st_ino == inode else 0

    def _open_tail(self, lines: int) -> tuple[int, int]:
        """The newest file, where its last lines begin, or an older one if that does not have so many."""
        file = self._open_newest()
        offset, missing = _tail_of(file, lines)
        for path in self._files[1:]:
            if missing and path.exists():
                os.close(file)
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                offset, missing = _tail_of(file, missing)
        return file, offset

    def _open_newest(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _open_following(self) -> int | None:
        """The file after this one, if this one was renamed."""
        while place := self._place():
            for path in reversed(self._files[:place]):
                with suppress(FileNotFoundError):
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    if self._place() == place:
                        return file
                    os.close(file)  # renamed meanwhile: perhaps another one follows
                    break
            else:
                return None
        return None

    def _place(self) -> int:
        """Where this file is among all of the log; after them if it was removed."""
        inode = os.fstat(self._file).st_ino
        for place, path in enumerate(self._files):  # in the order in which files are renamed
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    return place
        return len(self._files)

    def _read_file(self) -> bool:
        match = False
        while data := os.pread(self._file, _CHUNK, self._offset + len(self._rest)):
            match = True
            *lines, rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._pass_on(line)
                self._offset += len(line) + 1
            while len(rest) >= _LONGEST_LINE:
                self._pass_on(rest[:_LONGEST_LINE])
                self._offset += _LONGEST_LINE
                rest = rest[_LONGEST_LINE:]
            self._rest = rest
        return match

    def _pass_on(self, line: bytes) -> None:
        for start in range(0, max(1, len(line)), _LONGEST_LINE):
            self._write(line[start : start + _LONGEST_LINE].decode(errors="replace").rstrip("\r\n"))


class LogFollower:
    """Reads all followed logs, in one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: set[FollowedLog] = set()
        self._started = False

    def add(self, log: FollowedLog) -> None:
        """Read this one from now on."""
        with self._lock:
            self._logs.add(log)
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="karvan-logs", daemon=True).start()

    def finish(self, log: FollowedLog) -> None:
        """Its process has ended: read the rest, and forget it."""
        with self._lock:
            self._logs.discard(log)
        log.read(last=True)
        log.close()

    def _run(self) -> None:
        first, most = _PAUSES
        pause = first
        tick = threading.Event()
        while True:
            with self._lock:
                logs = list(self._logs)
            texts = [log.read() for log in logs]
            pause = first if any(texts) else min(most, 1.5 * pause)
            tick.wait(pause)


def _tail_of(file: int, lines: int) -> tuple[int, int]:
    """Where the last lines of a file begin, and how many of them it lacks."""
    at = os.fstat(file).st_size
    ends = lines + 1  # that of the line before, too
    while at > 0 and lines > 0:
        start = max(0, at - _CHUNK)
        block = os.pread(file, at - start, start)
        place = len(block)
        while ends and (place := block.rfind(b"\n", 0, place)) >= 0:
            ends -= 1
            if not ends:
                return start + place + 1, 0
        at = start
    return at, ends - 1


def _packed(inode: int, offset: int) -> bytes:
    return b"%20d %20d\n" % (inode, offset)


# `ending_with_parent`: the command of a process that the kernel kills when the one that started it dies.
#
# The process asks the kernel for that before it becomes the command, because no Python may run between fork
# and exec of a program that has threads. It is for processes without a keeper, which share the output of
# their parent. The parent's thread that starts them must live as long as they do.


_PR_SET_PDEATHSIG = 1
_START = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[1]):  # it died before the call above
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command, whose first word is a path, so that its process dies with this one, also by kill -9."""
    return [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command]


AWAY = 60.0  # seconds that processes wait for another master
_PROCESSES = "processes"
_ADDRESS = "master-address"
_REGISTRY = variable("registry")
_GONE_WITHIN = 10.0  # seconds in which processes that are killed are gone
_BACKOFF = 0.2  # seconds until a master is restarted for the first time; they double

# What the keeper of a process is asked for; see `keeper.py`.
_REQUESTS = {
    "stop": b"t",
    "interrupt": b"i",
    "kill": b"k",
    "dump_stacks": b"q",
    "suspend": b"s",
    "resume": b"c",
}
_OF_MASTERS = {**_REQUESTS, "suspend": b"z"}


class Restart(NamedTuple):
    """How often a keeper restarts its process: `most` times within `window` seconds, unless a file exists."""

    unless: Path
    most: int = 10
    window: float = 600.0


@dataclass
class LocalEngine:
    """Runs processes on this machine; `write(name, line)` receives their output.

    folder: of the job. away: seconds that processes wait for another master; for a master, the seconds that
    it has to end the job when its launcher dies, or None if it runs on. restart: for a master, which is
    restarted until it has ended for good. temporary: the folder is for these processes alone: a keeper that
    ends alone removes it. logs: the folder in which the logs are, if that is another one.
    """

    write: Callable[[str, str], None]
    folder: Path
    away: float | None = AWAY
    restart: Restart | None = None
    temporary: bool = False
    logs: Path | None = None

    def __post_init__(self) -> None:
        self._follower = LogFollower()

    def start(self, process: Process, ended: Ended) -> LocalHandle:
        """Start a process."""
        # A launcher may itself run in a process of another job, whose variables must not be passed on.
        without = (*LAUNCHED, *TORCH_NAMES, *NOT_PASSED_ON)
        inherited = {name: value for name, value in os.environ.items() if name not in without}
        environment = {**inherited, "PYTHONUNBUFFERED": "1"}
        folder = self._folder_of(process)
        for old in folder.parent.glob(f"{process.name}-*"):  # its end is known
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(0o700, parents=True)
        request: dict[str, Any] = {
            "command": process.command,
            "environment": {**environment, **process.environment, **_address_file(process, folder)},
            "log": str(self._log_of(process)),
            "log_bytes": keeper.LOG_BYTES,
            "away": self.away,
        }
        if self.restart is not None:
            unless = str(self.restart.unless)
            request["restart"] = {**self.restart._asdict(), "backoff": _BACKOFF, "unless": unless}
        log = self._log_of(process)
        log.parent.mkdir(0o700, exist_ok=True)
        FollowedLog.begin(log, folder / "shown")
        os.mkfifo(folder / "control", 0o600)
        lock = os.open(folder / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            handle = self._handle(process, folder, ended)
            with log.open("ab") as errors:
                arguments = [str(folder), str(lock), *([str(self.folder)] if self.temporary else [])]
                popen = self.start_keeper(process, arguments, environment, lock, errors)
        finally:
            os.close(lock)
        handle.watch(popen, json.dumps(request).encode())
        return handle

    @staticmethod
    def start_keeper(
        process: Process, arguments: list[str], environment: dict[str, str], lock: int, errors: BinaryIO
    ) -> subprocess.Popen[bytes]:
        """Start the keeper of a process, which inherits the lock and gets its request by a pipe."""
        return subprocess.Popen(
            [sys.executable, "-IS", keeper.__file__, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            pass_fds=(lock,),
        )

    def adopt(self, process: Process, record: Mapping[str, Any], ended: Ended) -> LocalHandle:
        """Take over a process that another master has started."""
        folder = Path(record["folder"]) if record else self._folder_of(process)
        folder.mkdir(0o700, parents=True, exist_ok=True)  # without one, it was never started
        self._log_of(process).parent.mkdir(0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(folder / "control", 0o600)
        handle = self._handle(process, folder, ended)
        handle.tell_master(process)
        handle.watch()
        return handle

    def _handle(self, process: Process, folder: Path, ended: Ended) -> LocalHandle:
        log = FollowedLog(
            self._log_of(process), lambda line: self.write(process.name, line), folder / "shown"
        )
        self._follower.add(log)
        return LocalHandle(process, folder, lambda: self._follower.finish(log), ended)

    def _folder_of(self, process: Process) -> Path:
        number = process.environment.get(variable("process")) or secrets.token_hex(8)
        return self.folder / _PROCESSES / f"{process.name}-{number}"

    def _log_of(self, process: Process) -> Path:
        return log_of(self.logs or self.folder, process.name)


class LocalHandle(Handle):
    """A process of this machine and its keeper, with a thread that waits for its end."""

    def __init__(self, process: Process, folder: Path, finish_log: Callable[[], None], ended: Ended) -> None:
        super().__init__(process, ended)
        self._folder = folder
        self._finish_log = finish_log
        # Opened for both directions: that neither waits for the keeper nor fails without it.
        self._control = os.open(folder / "control", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(self._control, b"h")

    def watch(self, popen: subprocess.Popen[bytes] | None = None, request: bytes = b"") -> None:
        """Wait for its end, in a thread; a keeper that was just started gets its request first."""
        name = f"{self._process.name} end"
        threading.Thread(target=self._watch, args=(popen, request), name=name, daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Its process id, once it has started; None if it could not be started."""
        self._started.wait()
        return _number_in(self._folder / "pid")

    @property
    def record(self) -> dict[str, Any]:
        """Where its keeper's files are."""
        return {"folder": str(self._folder)}

    def tell_master(self, process: Process) -> None:
        """The master is where the environment of this process says."""
        change_master_address(self._folder / _ADDRESS, process.environment.get(_REGISTRY, ""))

    @override
    def ask(self, request: str) -> None:
        self._started.wait()
        letters = _OF_MASTERS if self._process.role == Role.MASTER else _REQUESTS
        with self._lock, suppress(BlockingIOError):  # a keeper that takes no requests, such as a stopped one
            if self._code is None:
                os.write(self._control, letters[request])

    def _watch(self, popen: subprocess.Popen[bytes] | None, request: bytes) -> None:
        if popen is not None:
            assert popen.stdin is not None
            assert popen.stdout is not None
            with suppress(BrokenPipeError), popen.stdin as out:
                out.write(b"%08x" % len(request) + request)
            with popen.stdout as status:
                status.read()  # it is closed when the process has started
        self._started.set()
        wait_for_keeper(self._folder)
        if popen is not None:
            popen.wait()
        code = _number_in(self._folder / "exit")
        if (
            code is None and self._process.role != Role.MASTER
        ):  # the next master needs what this one has started
            _kill_descendants(self._process)
        with self._lock:
            # A keeper that was killed has left no code; its process was killed with it.
            self._code = -int(signal.SIGKILL) if code is None else code
            os.close(self._control)
        self._finish_log()
        self._reported.set()
        self._ended(self._process, self._code)


def _address_file(process: Process, folder: Path) -> dict[str, str]:
    """Make the master address file of a process that has a master; its variable."""
    if not process.environment.get(_REGISTRY):
        return {}
    make_master_address(folder / _ADDRESS, process.environment[_REGISTRY])
    return {variable("master_address_file"): str(folder / _ADDRESS)}


def log_of(folder: Path, name: str) -> Path:
    """The log of a process, in the folder of a job."""
    return folder / "logs" / f"{name}.log"


def wait_for_keeper(folder: Path) -> None:
    """Wait until the keeper of a process's folder has ended."""
    with (folder / "alive").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def keeper_lives(record: Mapping[str, Any]) -> bool:
    """Whether the keeper of a process runs, by the record of its handle."""
    return is_locked(Path(record["folder"]) / "alive")


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _kill_descendants(process: Process) -> None:
    """Kill what a process has started whose keeper was killed: it has the environment of the process."""
    name = variable("process")
    mark = f"{name}={process.environment.get(name)}".encode()
    until = time.monotonic() + _GONE_WITHIN
    while time.monotonic() < until:
        alive = [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_variable(pid, mark)
        ]
        if not alive:
            return
        for pid in alive:  # one that was just started is found the next time
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _has_variable(pid: int, text: bytes) -> bool:
    """Whether a process of this user was started with a variable; one that has ended has none."""
    try:
        return text in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
