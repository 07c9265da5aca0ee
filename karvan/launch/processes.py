"""The processes of a job as its supervisor sees them, their pauses, and the state for the next master."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from karvan.clock import clock
from karvan.files import read_object, replace_file
from karvan.job.roles import Role, start_order
from karvan.launch.engines.base import Handle, Process, name_of
from karvan.launch.merged_logs import MergedLogs
from karvan.work.task import holder_of


class Registration(StrEnum):
    """What a process has said to the registry of its job."""

    NONE = "none"  # it is starting, or is a program that does not connect
    PRESENT = "present"
    LEFT = "left"


@dataclass
class ManagedProcess:
    """One replica of a role, across all its processes."""

    role: Role
    index: int
    process: Process | None = None
    handle: Handle | None = None
    code: int | None = None  # of its last process; None while that runs
    started: float = 0.0
    due: float | None = None  # when it is to be restarted, alone
    stalled: bool = False  # whether its process is being killed for making no progress
    registration: Registration = Registration.NONE  # of its last process
    awaited: bool = False  # whether it was present at the last master, and this one has not heard of it
    token: str = ""  # KARVAN_PROCESS of its last process
    restarted: bool = False  # whether its last process has replaced another one
    generation: int = 0  # of its last process
    wanted: bool = True  # whether it is to run; false for trainers that a job has no use for at present

    @property
    def name(self) -> str:
        """Its name in logs."""
        return name_of(self.role, self.index)

    def note_health(self, healthy: bool | None) -> None:
        """Note what the registry says of the process, which runs; None: it does not know it."""
        if healthy is not None:
            self.registration, self.awaited = Registration.PRESENT, False
        elif self.registration is Registration.PRESENT and not self.awaited:
            self.registration = Registration.LEFT

    @property
    def starting(self) -> bool:
        """Whether its process runs and has not connected yet."""
        return self.running and self.registration is Registration.NONE

    @property
    def waits_for_room(self) -> bool:
        """Whether the engine has no place for its process yet."""
        return self.running and self.handle is not None and self.handle.pid is None

    @property
    def running(self) -> bool:
        """Whether a process was started and has not ended."""
        return self.handle is not None and self.code is None

    @property
    def key(self) -> tuple[Role, int]:
        """Its role and index."""
        return self.role, self.index

    @property
    def holder(self) -> str:
        """Its process by the name under which it holds tasks and trains."""
        return holder_of(self.role, self.index, self.token)


class ManagedProcesses:
    """All replicas of a job, in the order in which they start."""

    def __init__(self, replicas: dict[Role, int]) -> None:
        self._all = [
            ManagedProcess(role, index) for role in start_order() for index in range(replicas.get(role, 0))
        ]

    def __iter__(self) -> Iterator[ManagedProcess]:
        return iter(self._all)

    def of(self, role: Role) -> list[ManagedProcess]:
        """Those of one role."""
        return [member for member in self._all if member.role == role]

    def note_end(self, process: Process, code: int) -> ManagedProcess | None:
        """A process has ended; returns its replica, None if another process has replaced it."""
        for member in self._all:
            if member.process is process:
                member.code = code
                return member
        return None


def handles_of(members: Iterable[ManagedProcess]) -> list[Handle]:
    """The handles of those that are running."""
    return [member.handle for member in members if member.handle is not None and member.running]


def kill(members: Iterable[ManagedProcess]) -> None:
    """Kill those that are running."""
    for handle in handles_of(members):
        handle.kill()


# Pauses of a job: Ctrl-Z, and a master that could not run for a while.
#
# **Ctrl-Z** (SIGTSTP, which the launcher passes on to the master) stops all processes of the job, then the
# master itself; then the launcher stops, so that the shell gets its terminal back. `fg`, `bg` or SIGCONT
# continue the launcher, which continues the master, which continues the others. Connections between them stay
# open, and their deadlines do not count the pause (`karvan.clock`). Timeouts of other libraries do:
# torch's collectives fail if trainers wait in them at that moment and the pause is longer than their timeout
# (`kv.connect`), and the job then rolls back.
#
# **The master alone was stopped**, or the machine slept: heartbeats could not reach it. It logs this, and all
# timeouts start again.


_WRITE_WITHIN = (
    1.0  # seconds; a reader of the output, such as `tee`, may be stopped already by the same Ctrl-Z
)


@dataclass
class Suspension:
    """Suspends a job, and reports when its supervisor was asleep for more than `notice` seconds."""

    members: ManagedProcesses
    logs: MergedLogs
    notice: float
    paused: float = field(default_factory=lambda: clock.paused)  # all pauses that are reported

    def suspend(self) -> None:
        """Stop all processes and then this one; returns when it and the others have been continued."""
        for handle in handles_of(self.members):
            handle.suspend()
        writer = threading.Thread(target=self.logs.say, args=(SUSPENDED,), daemon=True)
        writer.start()
        writer.join(_WRITE_WITHIN)
        os.kill(os.getpid(), signal.SIGSTOP)
        clock.now()
        self.paused = clock.paused
        for handle in handles_of(self.members):
            handle.resume()
        self.logs.say(RESUMED)

    def check(self) -> None:
        """Log it if this process could not run for a while."""
        clock.now()
        asleep = clock.paused - self.paused
        self.paused = clock.paused
        if asleep > self.notice:
            self.logs.say(
                f"The master or the machine was asleep for {asleep:.0f} s; missing heartbeats of that time "
                "do not count, and all timeouts start again."
            )


RESUMED = "Resumed: all processes continue, and all timeouts start again."
SUSPENDED = "Suspended: all processes of the job are stopped; `fg`, `bg` or SIGCONT continue them."


# `JobState`: what a supervisor knows of its job, in a file, so that the next master continues from it.
#
# The file is small, and replaced as a whole before and after every start of a process, and after every event
# that changes something: a master that is killed leaves the state before or after a change. A full disk does
# not end the job, but is reported.

_log = logging.getLogger(__name__)
_reported: set[Path] = set()  # files that could not be written, of which a warning is enough


@dataclass
class MemberState:
    """The last process of a replica. `record` is empty until the process has surely started."""

    process: str = ""
    generation: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    waits: bool = False  # whether it is to be restarted, alone
    wanted: bool = True  # whether it is to run at present
    registration: str = "none"  # see `Registration`


@dataclass
class JobState:
    """The state of a job; `begun` once its processes were started for the first time."""

    path: Path | None = None
    begun: bool = False
    generation: int = 0
    rollback: bool = False  # whether trainers are killed, and restarted soon
    outcome: list[Any] | None = None  # code and failure, once it is known: the job is stopping
    restarts: list[float] = field(default_factory=list)  # wall-clock times
    crash_loop: list[Any] = field(default_factory=list)
    members: dict[str, MemberState] = field(default_factory=dict)
    saved: str = field(default="", init=False)  # the content of the file

    @classmethod
    def read(cls, path: Path) -> JobState:
        """The state in a file; a new one if there is none."""
        values = read_object(path)
        if values is None:
            return cls(path)
        members = {name: MemberState(**fields) for name, fields in values.pop("members").items()}
        return cls(path, **values, members=members)

    def save(self) -> None:
        """Replace the file, if there is one and something has changed."""
        if self.path is None:
            return
        values = asdict(self)
        del values["path"], values["saved"]
        content = json.dumps(values)
        if content == self.saved:
            return
        try:
            replace_file(self.path, content)
            self.saved = content
            _reported.discard(self.path)
        except OSError as error:
            if self.path not in _reported:
                _reported.add(self.path)
                _log.warning("The state of the job could not be saved, in case its master dies: %s", error)
