"""The supervisor of a job, whatever engine runs its processes.

A job starts its parameter servers, embedding workers, loaders and trainers, in this order, and then waits for
what happens:

    a loader or embedding worker dies    it alone is started again
    a parameter server dies              the job rolls back; with on_server_loss: reload it alone is started
                                         again, and trainers have it take its rows as they were saved
    a trainer dies                       the job rolls back
    a process is not healthy             it is killed, and so dies
    a process ends with code 2 or 3      the job fails with this code: wrong usage, or data that is not there,
                                         will be the same next time
    trainers fail by themselves, three   the job fails with code 1: a program that is wrong will be wrong next
      times from the same checkpoint       time
    too many deaths in a while           the job fails with code 1
    all trainers have ended with 0       the job is done
    Ctrl-C, SIGTERM                      the job stops, with code 130 or 143

To roll back is to kill all trainers, begin the next generation, start the servers that are not there and then
all trainers. They go on from the newest checkpoint by themselves; servers that have lived on forget their
rows when they hear of the new generation. Who else dies of the same cause meanwhile is no death of its own.

However a job ends, it stops trainers, loaders, embedding workers and servers, in this order: each is asked
with SIGTERM, and killed if it takes too long. Trainers save a checkpoint when they are asked, for which they
need the others. A second Ctrl-C kills all at once.
"""

from __future__ import annotations

import queue
import random
import signal
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from karvan.launch.attempts import Attempts
from karvan.launch.commands import Commands, commands_of
from karvan.launch.engine import Engine, Handle, Process, end_text, name_of
from karvan.launch.environment import environment_of
from karvan.launch.logs import Logs
from karvan.launch.roles import LOADER, SERVER, START_ORDER, TRAINER, Role

if TYPE_CHECKING:
    from karvan.launch.spec import JobSpec

_FAILED = 1
_OF_SIGNALS = 128  # exit codes from here on, and negative ones, are of processes that a signal has ended
_NOT_RETRIED = (2, 3)  # wrong usage; data or a checkpoint that is not there or damaged
_LONGEST_DELAY = 30.0
_GRACE_OF_OTHERS = 10.0  # trainers have a checkpoint to save, nobody else does


class Registry(Protocol):
    """Where roles find each other, and who tells which of them are well."""

    @property
    def address(self) -> str:
        """host:port."""

    def healthy(self, role: str, index: int) -> bool | None:
        """Whether a role does what it should; None if nothing is known of it."""

    def forget(self, role: str, index: int) -> None:
        """A process has ended; another one will take its place."""


@dataclass(frozen=True)
class Outcome:
    """How a job has ended: its exit code, and why if it failed."""

    code: int
    failure: str | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds. Delays double with every restart, and differ at random, so that not all come back at once."""

    backoff: float = 0.5
    check: float = 1.0  # between checks of health
    settle: float = 60.0  # after its start, nobody is asked whether a process is healthy


@dataclass
class _Member:
    """One replica of a role, through all its processes."""

    role: Role
    index: int
    process: Process | None = None
    handle: Handle | None = None
    code: int | None = None  # of its last process; None while that runs
    started: float = 0.0
    due: float | None = None  # when it is to be started again, alone

    @property
    def name(self) -> str:
        return name_of(self.role, self.index)

    @property
    def running(self) -> bool:
        return self.handle is not None and self.code is None


@dataclass(frozen=True)
class _Ended:
    process: Process
    code: int


@dataclass(frozen=True)
class _Asked:
    signal: int


@dataclass
class Job:
    """A job; `run` runs it to its end."""

    spec: JobSpec
    engine: Engine
    registry: Registry
    logs: Logs
    commands: Commands | None = None
    timing: Timing = Timing()
    generation: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._commands = commands_of(self.spec) if self.commands is None else self.commands
        self._members = [
            _Member(role, index) for role in START_ORDER for index in range(self.spec.of_role(role).replicas)
        ]
        self._events: queue.SimpleQueue[_Ended | _Asked] = queue.SimpleQueue()
        self._outcome: Outcome | None = None
        self._restarts: deque[float] = deque()
        self._attempts = Attempts(self.spec.checkpoints)
        self._rollback: float | None = None  # when it is due
        self._checked = 0.0
        self._hurry = False
        self._meeting = ("", 0)

    def interrupt(self, number: int) -> None:
        """Stop, as by this signal. May be called by a signal handler, and from any thread."""
        self._events.put(_Asked(number))

    def run(self) -> Outcome:
        """Start everything, keep it going, stop it in order."""
        try:
            self._meeting = self.engine.meeting()
            for member in self._members:
                self._start(member)
            while self._outcome is None:
                self._take(self._next_event(self._patience()))
                self._check_health()
                self._start_due()
            for role in reversed(START_ORDER):
                self._stop(role)
            return self._outcome
        finally:
            self._kill(self._members)

    # What happens

    def _next_event(self, timeout: float) -> _Ended | _Asked | None:
        try:
            return self._events.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None

    def _take(self, event: _Ended | _Asked | None) -> None:
        if isinstance(event, _Ended):
            member = self._note_end(event)
            if member is not None:
                self._react(member, event.code)
        elif event is not None:
            self.logs.tell("Stopping: trainers first, then the others. Ctrl-C kills all at once.")
            self._outcome = Outcome(128 + event.signal)

    def _note_end(self, event: _Ended) -> _Member | None:
        for member in self._members:
            if member.process is event.process:
                member.code = event.code
                return member
        return None

    def _react(self, member: _Member, code: int) -> None:
        if code == 0 and member.role in (TRAINER, LOADER):
            self.logs.tell(f"{member.name} is done.")
            if all(trainer.code == 0 for trainer in self._of(TRAINER)):
                self._outcome = Outcome(0)
        elif self._rollback is not None and member.role in (TRAINER, SERVER):
            pass  # the rollback starts it again
        elif code in _NOT_RETRIED:
            self._fail(member, code, f"{member.name} {end_text(code)}, which is not tried again.")
        elif self._is_in_vain(member, code):
            text = f"{member.name} {end_text(code)}, once more without a newer checkpoint."
            self._fail(member, _FAILED, text)
        elif not self._may_restart():
            limit = f"{self.spec.max_restarts} restarts within {self.spec.restart_window:g} seconds"
            self._fail(member, _FAILED, f"{member.name} {end_text(code)}, after {limit}.")
        elif member.role == TRAINER or (member.role == SERVER and self.spec.on_server_loss == "rollback"):
            self.logs.tell(f"{member.name} {end_text(code)}; all trainers {self._attempts.next_start}.")
            self._kill_trainers()
            self._rollback = time.monotonic() + self._delay()
        else:
            self.logs.tell(f"{member.name} {end_text(code)}; it is started again.")
            member.due = time.monotonic() + self._delay()

    def _is_in_vain(self, member: _Member, code: int) -> bool:
        if not 0 < code < _OF_SIGNALS:
            self._attempts.forget()
            return False
        return member.role == TRAINER and self._attempts.failed()

    def _fail(self, member: _Member, code: int, text: str) -> None:
        tail = self.logs.tail(member.name)
        if tail:
            text = "\n".join([f"{text} Its last lines:", *tail])
        self._outcome = Outcome(code, text)
        if member.role in (TRAINER, SERVER):  # without it the trainers have nothing left to save
            self._kill_trainers()

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - self.spec.restart_window:
            self._restarts.popleft()
        if len(self._restarts) >= self.spec.max_restarts:
            return False
        self._restarts.append(now)
        return True

    def _delay(self) -> float:
        doubled = self.timing.backoff * 2.0 ** (len(self._restarts) - 1)
        return min(doubled, _LONGEST_DELAY) * random.uniform(0.5, 1.0)

    def _check_health(self) -> None:
        now = time.monotonic()
        if now < self._checked + self.timing.check or self._outcome is not None:
            return
        self._checked = now
        for member in self._members:
            if not member.running or now < member.started + self.timing.settle:
                continue
            if self.registry.healthy(member.role, member.index) is False:
                self.logs.tell(f"{member.name} does not answer any more; it is killed.")
                member.started = now  # its death may take a moment
                self._kill([member])

    # Starting

    def _patience(self) -> float:
        """Seconds until there is something to do even if nothing happens."""
        moments = [self._checked + self.timing.check]
        moments += [member.due for member in self._members if member.due is not None]
        if self._rollback is not None and not self._any_running(TRAINER):
            moments.append(self._rollback)
        return min(moments) - time.monotonic()

    def _start_due(self) -> None:
        now = time.monotonic()
        if self._outcome is not None:
            return
        if self._rollback is not None and self._rollback <= now and not self._any_running(TRAINER):
            self._roll_back()
        for member in self._members:
            if member.due is not None and member.due <= now:
                self._start(member)

    def _roll_back(self) -> None:
        self._rollback = None
        self.generation += 1
        self._meeting = self.engine.meeting()
        self.logs.tell(f"Generation {self.generation} begins.")
        for member in self._members:
            if (member.role in (SERVER, TRAINER) and not member.running) or (
                member.role == LOADER and member.code == 0
            ):
                self._start(member)

    def _start(self, member: _Member) -> None:
        environment = environment_of(
            self.spec,
            member.role,
            member.index,
            registry=self.registry.address,
            generation=self.generation,
            meeting=self._meeting,
        )
        self.registry.forget(member.role, member.index)  # where its last process was
        member.process = Process(member.role, member.index, self._commands[member.role], environment)
        member.code, member.due, member.started = None, None, time.monotonic()
        self.logs.begin(member.name)
        member.handle = self.engine.start(
            member.process, lambda process, code: self._events.put(_Ended(process, code))
        )
        self.logs.tell(f"Started {member.name}, process {member.handle.pid}.")

    # Stopping

    def _stop(self, role: Role) -> None:
        grace = self.spec.grace if role == TRAINER else min(self.spec.grace, _GRACE_OF_OTHERS)
        if not self._hurry:
            for member in self._of(role):
                if member.running and member.handle is not None:
                    member.handle.stop()
            self._wait_for(role, grace)
        late = [member for member in self._of(role) if member.running]
        for member in late:
            self.logs.tell(f"{member.name} is killed.")
        self._kill(late)
        self._wait_for(role, _GRACE_OF_OTHERS, even_in_hurry=True)

    def _wait_for(self, role: Role, seconds: float, *, even_in_hurry: bool = False) -> None:
        deadline = time.monotonic() + seconds
        while self._any_running(role) and (even_in_hurry or not self._hurry):
            event = self._next_event(deadline - time.monotonic())
            if isinstance(event, _Ended):
                self._note_end(event)
            elif isinstance(event, _Asked) and event.signal == signal.SIGINT:
                self.logs.tell("Killing all.")
                self._hurry = True
                self._kill(self._members)
            elif event is None:
                return

    def _kill_trainers(self) -> None:
        self._kill(self._of(TRAINER))

    def _kill(self, members: Iterable[_Member]) -> None:
        for member in members:
            if member.running and member.handle is not None:
                member.handle.kill()

    def _of(self, role: Role) -> list[_Member]:
        return [member for member in self._members if member.role == role]

    def _any_running(self, role: Role) -> bool:
        return any(member.running for member in self._of(role))
