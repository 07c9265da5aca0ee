"""The supervisor of a job, with any engine.

A job starts its parameter servers, embedding workers, loaders and trainers, in this order, and then reacts to
events:

    a loader or embedding worker dies    it alone is restarted
    a parameter server dies              the job rolls back; with on_server_loss: reload it alone is
                                         restarted, and trainers have it load its saved rows
    a trainer dies                       the job rolls back
    a process is not healthy             it is killed, and so dies (`health.py`)
    a process ends with code 2 or 3      the job fails with this code: wrong usage, or missing data, will be
                                         the same next time
    a process ends with code 75          as if it had died: not the program has failed but its environment: a
                                         disk is full, or data, a server or another rank is unavailable
    trainers fail by themselves, three   the job fails with code 1: a wrong program will be wrong next time
      times from the same checkpoint
    too many deaths within a window      the job fails with code 1, or with 75 if that was the last code
    all trainers have ended with 0       the job is done
    Ctrl-C, SIGTERM                      the job stops, with code 130 or 143 (`shutdown.py`)
    Ctrl-Z                               all stop, and continue with `fg` (`suspending.py`)

A rollback kills all trainers, starts the next generation, then the servers that are not running and all
trainers. Trainers resume from the newest checkpoint by themselves; servers that survived drop their rows when
they learn of the new generation. Other processes that die of the same cause in the meantime are not counted.

All times are those of `karvan.clock`: the time during which the launcher was stopped, or the machine slept,
does not count against any process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from karvan.clock import clock
from karvan.exit_codes import DAMAGED, FAILED, TEMPORARY, USAGE
from karvan.job.roles import START_ORDER, Role
from karvan.job.server_loss import ServerLoss
from karvan.launch.engines.base import Engine, Handle, Process, end_text
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.role_commands import Commands, commands_of
from karvan.launch.role_environment import environment_of
from karvan.launch.supervision.crash_loop import CrashLoopDetector
from karvan.launch.supervision.events import EventQueue, ProcessEnded, StopRequested
from karvan.launch.supervision.health import HealthCheck, HealthSource
from karvan.launch.supervision.processes import ManagedProcess, ManagedProcesses, kill
from karvan.launch.supervision.restarts import RestartBudget
from karvan.launch.supervision.shutdown import Shutdown
from karvan.launch.supervision.suspending import Suspension
from karvan.launch.supervision.verdict import End, Verdict

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec

_OF_SIGNALS = (
    128  # such exit codes and larger ones, and negative ones, are of processes that a signal has ended
)
_NOT_RETRIED = (USAGE, DAMAGED)


class RegistryView(HealthSource, Protocol):
    """Where roles find each other; it also knows which of them are healthy."""

    @property
    def address(self) -> str:
        """host:port."""

    def forget(self, role: Role, index: int) -> None:
        """A process has ended; another one will replace it."""

    def begin_generation(self, generation: int) -> None:
        """Trainers are restarted, and rendezvous again."""


@dataclass(frozen=True)
class JobOutcome:
    """How a job has ended: its exit code, and why if it failed."""

    code: int
    failure: str | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds. Delays double with every restart, and are random, so that not all restart at once."""

    backoff: float = 0.5
    check: float = 1.0  # between checks of health
    settle: float = 60.0  # after its start, in which the health of a process is not checked
    pause: float = 5.0  # of the launcher itself; longer ones are reported


@dataclass
class Supervisor:
    """Supervises a job; `run` runs it to its end."""

    spec: JobSpec
    engine: Engine
    registry: RegistryView
    logs: MergedLogs
    commands: Commands | None = None
    timing: Timing = Timing()
    owner: str = ""  # the id of the lease of its checkpoint folder
    generation: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        spec, timing = self.spec, self.timing
        self._commands = commands_of(spec) if self.commands is None else self.commands
        self._members = ManagedProcesses({role: spec.of_role(role).replicas for role in START_ORDER})
        self._suspension = Suspension(self._members, self.logs, timing.pause)
        self._events = EventQueue(self._suspension.suspend)
        self._health = HealthCheck(
            self._members,
            self.registry,
            self.logs,
            every=timing.check,
            settle=timing.settle,
            stall_timeout=spec.stall_timeout,
        )
        self._restarts = RestartBudget(spec.max_restarts, spec.restart_window, timing.backoff)
        self._crash_loop = CrashLoopDetector(spec.checkpoints)
        self._verdict = Verdict()
        self._outcome: JobOutcome | None = None
        self._rollback: float | None = None  # when it is due

    def interrupt(self, number: int) -> None:
        """Stop, because of this signal. May be called by a signal handler, and from any thread."""
        self._events.stop(number)

    def suspend(self) -> None:
        """Stop all processes and this one until it is continued. May be called like `interrupt`."""
        self._events.suspend()

    def run(self) -> JobOutcome:
        """Start all processes, keep them running, stop them in order."""
        try:
            self._start(self._members)
            while self._outcome is None:
                self._take(self._events.get(self._patience()))
                self._suspension.check()
                if self._outcome is None:
                    self._health.check()
                    self._start_due()
            Shutdown(self._members, self._events, self.logs, self.spec.grace).run()
            return self._outcome
        finally:
            kill(self._members)

    # Reacting to events

    def _take(self, event: ProcessEnded | StopRequested | None) -> None:
        if isinstance(event, ProcessEnded):
            member = self._members.note_end(event.process, event.code)
            if member is not None:
                self._judge(member, event.code)
        elif event is not None:
            self.logs.say("Stopping: trainers first, then the others. Ctrl-C kills all at once.")
            self._outcome = JobOutcome(128 + event.signal)

    def _judge(self, member: ManagedProcess, code: int) -> None:
        """React to the end of a process; of several trainers, to that of the one that is the cause."""
        cause: End | None = (member, code)
        if member.role == Role.TRAINER and self._rollback is None:
            cause = self._verdict.judge(member, code, self._members.any_running(Role.TRAINER))
        if cause is not None:
            self._react(*cause)

    def _react(self, member: ManagedProcess, code: int) -> None:
        if code == 0 and member.role in (Role.TRAINER, Role.LOADER):
            self.logs.say(f"{member.name} is done.")
            if all(trainer.code == 0 for trainer in self._members.of(Role.TRAINER)):
                self._outcome = JobOutcome(0)
        elif self._rollback is not None and member.role in (Role.TRAINER, Role.PARAMETER_SERVER):
            pass  # the rollback restarts it
        elif code in _NOT_RETRIED:
            self._fail(member, code, f"{member.name} {end_text(code)}, which is not retried.")
        elif self._is_crash_loop(member, code):
            text = f"{member.name} {end_text(code)}, again without a newer checkpoint."
            self._fail(member, FAILED, text)
        elif not self._restarts.take():
            failed = TEMPORARY if code == TEMPORARY else FAILED
            self._fail(member, failed, f"{member.name} {end_text(code)}, after {self._restarts}.")
        elif member.role == Role.TRAINER or (
            member.role == Role.PARAMETER_SERVER and self.spec.on_server_loss is ServerLoss.ROLLBACK
        ):
            self.logs.say(f"{member.name} {end_text(code)}; all trainers {self._crash_loop.next_start}.")
            kill(self._members.of(Role.TRAINER))
            self._rollback = self._restarts.due()
            self._verdict.clear()
        else:
            self.logs.say(f"{member.name} {end_text(code)}; it is restarted.")
            member.due = self._restarts.due()

    def _is_crash_loop(self, member: ManagedProcess, code: int) -> bool:
        if not 0 < code < _OF_SIGNALS and not member.stalled:
            self._crash_loop.forget()
            return False
        return code != TEMPORARY and member.role == Role.TRAINER and self._crash_loop.failed()

    def _fail(self, member: ManagedProcess, code: int, text: str) -> None:
        if reason := self.logs.reason(member.name):
            text = "\n".join(
                [f"{text} {'It said:' if reason.is_error else 'Its last lines:'}", *reason.lines]
            )
        self._outcome = JobOutcome(code, text)
        # Without a server the trainers have nothing left to save.
        if member.role in (Role.TRAINER, Role.PARAMETER_SERVER):
            kill(self._members.of(Role.TRAINER))

    # Starting

    def _patience(self) -> float:
        """Seconds until there is something to do even without an event."""
        moments = [self._health.due]
        moments += [member.due for member in self._members if member.due is not None]
        if self._verdict.due is not None:
            moments.append(self._verdict.due)
        if self._rollback is not None and not self._members.any_running(Role.TRAINER):
            moments.append(self._rollback)
        return min(moments) - clock.now()

    def _start_due(self) -> None:
        now = clock.now()
        if (cause := self._verdict.overdue()) is not None:
            self._react(*cause)
        due = self._rollback is not None and self._rollback <= now
        if due and not self._members.any_running(Role.TRAINER):
            self._roll_back()
        self._start([each for each in self._members if each.due is not None and each.due <= now])

    def _roll_back(self) -> None:
        self._rollback = None
        self.generation += 1
        self.registry.begin_generation(self.generation)
        self.logs.say(f"Generation {self.generation} begins.")
        self._start(
            [
                member
                for member in self._members
                if (member.role in (Role.PARAMETER_SERVER, Role.TRAINER) and not member.running)
                or (member.role == Role.LOADER and member.code == 0)
            ]
        )

    def _start(self, members: Iterable[ManagedProcess]) -> None:
        started = [(member, self._start_one(member)) for member in members]
        for member, handle in started:
            self.logs.say(f"Started {member.name}, process {handle.pid}.")

    def _start_one(self, member: ManagedProcess) -> Handle:
        environment = environment_of(
            self.spec,
            member.role,
            member.index,
            registry=self.registry.address,
            generation=self.generation,
            owner=self.owner,
        )
        self.registry.forget(member.role, member.index)  # the address of its last process
        member.process = Process(member.role, member.index, self._commands[member.role], environment)
        member.code, member.due, member.started, member.stalled = None, None, clock.now(), False
        self.logs.begin(member.name)
        member.handle = handle = self.engine.start(member.process, self._events.ended)
        return handle
