"""The supervisor of a job, with any engine.

A job starts its parameter servers, embedding workers, loaders and trainers, in this order, and then reacts to
events:

    a loader or embedding worker dies    it alone is restarted
    a parameter server dies              the job rolls back; with on_server_loss: reload it alone is
                                         restarted, and trainers have it load its saved rows
    a trainer dies                       the job rolls back; with sharding: dynamic it alone is restarted, and
                                         the others continue or start, unless all that trained are gone
    a process is not healthy             it is killed, and so dies (`health.py`)
    a process ends with code 2 or 3      the job fails with this code: wrong usage, or missing data, will be
                                         the same next time
    a process ends with code 75          as if it had died: not the program has failed but its environment: a
                                         disk is full, or data, a server or another rank is unavailable
    trainers or servers fail by          the job fails with code 1: a wrong program is wrong next time, as are
      themselves, three times from         rows that do not fit into the memory of a server
      the same checkpoint
    too many deaths within a window      the job fails with code 1, or with 75 if that was the last code
    all trainers have ended with 0       the job is done
    Ctrl-C, SIGTERM                      the job stops, with code 130 or 143
    Ctrl-Z                               all stop, and continue with `fg` (`processes.py`)
    the master dies                      the next one adopts the running processes (`processes.py`)

A rollback kills all trainers, starts the next generation, then the servers that are not running and all
trainers. Trainers resume from the newest checkpoint by themselves; servers that survived drop their rows when
they learn of the new generation. Other processes that die of the same cause in the meantime are not counted.

The tasks of a trainer or loader that has died, or makes no progress with them, are given to others.

All times are those of `karvan.clock`: the time during which the master was stopped, or the machine slept,
does not count against any process.
"""

from __future__ import annotations

import queue
import secrets
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from karvan.clock import clock
from karvan.errors import DAMAGED, FAILED, TEMPORARY, USAGE
from karvan.job.environment import ServerLoss
from karvan.job.roles import Role, start_order
from karvan.launch.engines.base import Engine, Handle, Process, end_text
from karvan.launch.health import HealthCheck, Timing
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.processes import (
    JobState,
    ManagedProcess,
    ManagedProcesses,
    MemberState,
    Registration,
    Suspension,
    handles_of,
    kill,
)
from karvan.launch.restarts import CrashLoopDetector, End, RestartBudget, Verdict
from karvan.launch.role_programs import Commands, environment_of

if TYPE_CHECKING:
    from karvan.discovery.registry import Registry
    from karvan.launch.job_spec import JobSpec
    from karvan.work.service import WorkService
    from karvan.work.trainer_group import TrainerGroup


_GRACE_OF_OTHERS = 10.0  # seconds in which a process ends that has no checkpoint to save
_OF_SIGNALS = 128  # such exit codes and larger ones are of processes that a signal has ended; so are negative
_NOT_RETRIED = (USAGE, DAMAGED)
_WORK_EVERY = 1.0  # seconds between two checks for tasks that make no progress


@dataclass(frozen=True)
class JobOutcome:
    """How a job has ended: its exit code, and why if it failed."""

    code: int
    failure: str | None = None


@dataclass
class Supervisor:
    """Supervises a job; `run` runs it to its end."""

    spec: JobSpec
    engine: Engine
    registry: Registry
    logs: MergedLogs
    commands: Commands
    work: WorkService
    group: TrainerGroup
    timing: Timing = field(default_factory=Timing)
    owner: str = ""  # the id of the lease of its checkpoint folder
    state: JobState = field(default_factory=JobState)
    started: Callable[[], None] = lambda: None  # called when all processes were started

    def __post_init__(self) -> None:
        spec, timing = self.spec, self.timing
        self.members = ManagedProcesses({role: spec.of_role(role).most for role in start_order()})
        self._trainers = self.members.of(Role.TRAINER)
        self._want_trainers(spec.roles.trainers.replicas)
        self._suspension = Suspension(self.members, self.logs, timing.pause)
        # What happens to processes and is asked for by signals and commands, put here from any thread.
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._hurry = False  # whether all are killed
        self._health = HealthCheck(self.members, self.registry, self.logs, timing, spec.stall_timeout)
        self._restarts = RestartBudget(spec.max_restarts, spec.restart_window, timing.backoff)
        self._crash_loop = CrashLoopDetector(spec.checkpoints)
        self._verdict = Verdict()
        self._outcome: JobOutcome | None = None
        self._rollback: float | None = None  # when it is due
        self._work_checked = 0.0
        self._counted = 0.0  # when a death before there was a group was counted last

    def interrupt(self, number: int) -> None:
        """Stop, because of this signal. May be called by a signal handler, and from any thread."""
        self._events.put(lambda: self._interrupt(number))

    def suspend(self) -> None:
        """Stop all processes and this one until it is continued. May be called like `interrupt`."""
        self._events.put(self._suspension.suspend)

    def run(self) -> JobOutcome:
        """Start all processes, keep them running, stop them in order."""
        if self.state.begun:
            self._continue()
        else:
            self.state.begun = True
            self._start([member for member in self.members if member.wanted])
        self.started()
        while self._outcome is None:
            self._take_event(self._patience())
            self._suspension.check()
            if self._outcome is None:
                self._health.check()
                self._check_work()
                self._end_without_late()
                self._start_due()
            self.group.expect(sum(trainer.wanted and trainer.code != 0 for trainer in self._trainers))
            self._save()
        self._stop_all()
        return self._outcome

    @property
    def stopping(self) -> bool:
        """Whether the job is about to end."""
        return self._outcome is not None

    # Reacting to events

    def _take_event(self, seconds: float) -> bool:
        """React to the next event; returns whether there was one within some seconds."""
        until = clock.now() + seconds
        while True:
            try:
                event = self._events.get(timeout=max(until - clock.now(), 0.0))
            except queue.Empty:
                if clock.now() >= until:  # otherwise this process was stopped in the meantime
                    return False
                continue
            event()
            return True

    def _ended(self, process: Process, code: int) -> None:
        self._events.put(lambda: self._take_end(process, code))

    def _take_end(self, process: Process, code: int) -> None:
        member = self.members.note_end(process, code)
        if member is not None and self._outcome is None:
            self._note_end(member, code)

    def _interrupt(self, number: int) -> None:
        if self._outcome is None:
            self.logs.say("Stopping: trainers first, then the others. Ctrl-C kills all at once.")
            self._outcome = JobOutcome(128 + number)
        elif number == signal.SIGINT:
            self.logs.say("Killing all.")
            self._hurry = True
            kill(self.members)

    def _note_end(self, member: ManagedProcess, code: int) -> None:
        """A process has ended: who has its work, and what follows from it."""
        if member.role.is_rank and self.spec.sharding == "dynamic":
            name = member.holder
            has_left, begun = code == 0 and self.group.has_left(name), self.group.has_begun()
            predict = self.work.release_predictions(name)  # those of training wait until others have settled
            others = self.group.remove(name) or predict
            if not begun:
                self._release_work(member)  # nobody has to settle anything
            if self._rollback is None and self.spec.continues and (others or has_left or not begun):
                self._replace_trainer(member, code, has_left, others, begun)
                return
        else:
            self._release_work(member)
        self._judge(member, code)

    def _replace_trainer(
        self, member: ManagedProcess, code: int, has_left: bool, others: bool, begun: bool
    ) -> None:
        """A trainer is gone, and the others continue, if there are any: start it again, to join them.

        begun: whether they train already. Before, those that ran when one died may die of the same cause,
        which counts once.
        """
        free = has_left or (not begun and member.started < self._counted)
        if not member.wanted:
            self.logs.say(f"{member.name} {end_text(code)}: the job continues with fewer trainers.")
        elif code == 0 and not has_left:
            self._react(member, code)
        elif self._may_restart(member, code, free=free):
            how = "has left" if has_left else end_text(code)
            continues = "the others continue, and it is" if others else "it is"
            self.logs.say(f"{member.name} {how}; {continues} restarted.")
            member.due = self._restarts.due()
            if not (begun or free):
                self._counted = clock.now()

    def _judge(self, member: ManagedProcess, code: int) -> None:
        """React to the end of a process; of several trainers, to that of the one that is the cause."""
        cause: End | None = (member, code)
        if member.role.is_rank and self._rollback is None:
            cause = self._verdict.judge(member, code, any(trainer.running for trainer in self._trainers))
        if cause is not None:
            self._react(*cause)

    def _react(self, member: ManagedProcess, code: int) -> None:
        if code == 0 and member.role.finishes:
            self.logs.say(f"{member.name} is done.")
            if all(trainer.code == 0 for trainer in self._trainers if trainer.wanted):
                self._outcome = JobOutcome(0)
        elif self._rollback is not None and not member.role.restarts_alone:
            pass  # the rollback restarts it
        elif not self._may_restart(member, code, because=True):
            return
        elif member.role.restarts_alone or (
            member.role.holds_rows and self.spec.on_server_loss is ServerLoss.RELOAD
        ):
            self.logs.say(f"{member.name} {end_text(code)}; it is restarted.")
            member.due = self._restarts.due()
        else:
            self.logs.say(f"{member.name} {end_text(code)}; all trainers {self._crash_loop.next_start}.")
            self._stop_for_rollback()
            self._rollback = self._restarts.due()
            self._verdict.clear()

    def _may_restart(
        self, member: ManagedProcess, code: int, *, free: bool = False, because: bool = False
    ) -> bool:
        """Whether a process that has ended so may be restarted; if not, the job fails.

        free: its end does not count. because: the failure says why it is not restarted.
        """
        if code in _NOT_RETRIED:
            why, failed = ", which is not retried" if because else "", code
        elif not free and self._is_crash_loop(member, code):
            why, failed = ", again without a newer checkpoint" if because else "", FAILED
        elif not free and not self._restarts.take():
            why, failed = f", after {self._restarts}", TEMPORARY if code == TEMPORARY else FAILED
        else:
            return True
        self._fail(member, failed, f"{member.name} {end_text(code)}{why}.")
        return False

    def _stop_for_rollback(self) -> None:
        """Kill all trainers; those that were about to start alone start with the others."""
        kill(self._trainers)
        for member in self.members:
            if not member.role.restarts_alone:
                member.due = None

    def _is_crash_loop(self, member: ManagedProcess, code: int) -> bool:
        by_itself = 0 < code < _OF_SIGNALS
        if not by_itself and not member.stalled:
            self._crash_loop.forget()
            return False
        counts = member.role.is_rank or (by_itself and not member.role.restarts_alone)
        return counts and code != TEMPORARY and self._crash_loop.failed()

    def _fail(self, member: ManagedProcess, code: int, text: str) -> None:
        if reason := self.logs.reason(member.name):
            text = "\n".join(
                [f"{text} {'It said:' if reason.is_error else 'Its last lines:'}", *reason.lines]
            )
        self._outcome = JobOutcome(code, text)
        # Without a server the trainers have nothing left to save.
        if not member.role.restarts_alone:
            kill(self._trainers)

    # Stopping

    def _stop_all(self) -> None:
        """Stop all processes, role by role, in the reverse of the order in which they start.

        Each gets SIGTERM, and is killed if it takes too long. Trainers then save a checkpoint, for which they
        need the others, so they are first. A second Ctrl-C kills all at once.
        """
        for role in reversed(start_order()):
            members = self.members.of(role)
            if not self._hurry:
                for handle in handles_of(members):
                    handle.stop()
                grace = self.spec.grace
                self._wait_for(members, grace if role.saves else min(grace, _GRACE_OF_OTHERS))
            late = [member for member in members if member.running]
            for member in late:
                self.logs.say(f"{member.name} is killed.")
            kill(late)
            self._wait_for(members, _GRACE_OF_OTHERS, even_in_hurry=True)
        kill(self.members)

    def _wait_for(
        self, members: list[ManagedProcess], seconds: float, *, even_in_hurry: bool = False
    ) -> None:
        deadline = clock.now() + seconds
        while handles_of(members) and (even_in_hurry or not self._hurry):
            if not self._take_event(deadline - clock.now()):
                return

    # The number of trainers

    def scale(self, trainers: int) -> None:
        """Have this many trainers from now on. May be called from any thread."""
        self._events.put(lambda: self._scale(trainers))

    def _want_trainers(self, count: int) -> None:
        for member in self._trainers:
            member.wanted = member.index < count

    def _scale(self, trainers: int) -> None:
        if self._outcome is not None:
            return
        before = sum(trainer.wanted for trainer in self._trainers)
        self.logs.say(f"From {before} to {trainers} trainers.")
        self._want_trainers(trainers)
        for member in self._trainers:
            if not member.wanted:
                member.due = None
                for handle in handles_of([member]):
                    handle.stop()  # it finishes its batch and leaves
            elif not member.running and self._rollback is None:
                member.due = clock.now()

    # Leased work

    def _release_work(self, member: ManagedProcess) -> None:
        if member.role.holds_tasks:
            tasks = self.work.release_process(member.holder)
            if tasks:
                self.logs.say(f"{len(tasks)} tasks of {member.name} are leased to others.")

    def _check_work(self) -> None:
        if clock.now() < self._work_checked + _WORK_EVERY:
            return
        self._work_checked = clock.now()
        for lease in self.work.overdue(self.group.is_member):
            self.logs.say(f"{lease.holder} made no progress with {lease.task}, which others can lease now.")

    def _end_without_late(self) -> None:
        """End the job once trainers are done, without those that do not start: no work is left for them.

        One that is restarted is not waited for: the others have done what it would do. One that starts for
        the first time may have work of its own, unless it does not come.
        """
        if not self.spec.continues:
            return
        trainers = [trainer for trainer in self._trainers if trainer.wanted]
        late = [trainer for trainer in trainers if trainer.code != 0]
        connect = any(
            trainer.code == 0 and trainer.registration is not Registration.NONE for trainer in trainers
        )
        if not (late and connect):
            return
        settled = clock.now() - self.timing.settle
        restarting = [trainer for trainer in late if self._only_restarts(trainer) and self.work.has_work()]
        needless = all(
            trainer in restarting
            or (trainer.starting and (trainer.waits_for_room or trainer.started <= settled))
            for trainer in late
        )
        if needless and self.work.is_complete():
            names = ", ".join(trainer.name for trainer in late)
            absent = "not connected yet, and no work is left"
            done = "all work is done while it is restarted" if restarting else absent
            self.logs.say(f"The job ends without {names}: {done}.")
            self._outcome = JobOutcome(0)

    def _only_restarts(self, member: ManagedProcess) -> bool:
        """Whether a trainer was killed, and the process that replaces it does not train yet."""
        if member.due is not None:
            return bool(member.token)  # that of its last process
        return member.running and member.restarted and member.holder not in self.group.members

    # Continuing the job of a master that died

    def _save(self) -> None:
        state = self.state
        state.rollback = self._rollback is not None
        state.outcome = None if self._outcome is None else [self._outcome.code, self._outcome.failure]
        state.restarts, state.crash_loop = self._restarts.times(), self._crash_loop.state()
        state.members = {
            member.name: MemberState(
                member.token,
                member.generation,
                {} if member.handle is None else member.handle.record,
                member.code,
                member.due is not None,
                member.wanted,
                member.registration,
            )
            for member in self.members
        }
        state.save()

    def _continue(self) -> None:
        """Adopt the processes that the last master started, and react to what it did not."""
        state, now = self.state, clock.now()
        self._restarts.restore(state.restarts)
        self._crash_loop.restore(state.crash_loop)
        if state.outcome is not None:
            self._outcome = JobOutcome(*state.outcome)
        self._rollback = now if state.rollback else None
        adopted = []
        for member in self.members:
            saved = state.members.get(member.name, MemberState())
            member.token, member.generation, member.code = saved.process, saved.generation, saved.code
            member.wanted, member.registration = saved.wanted, Registration(saved.registration)
            member.awaited = member.registration is Registration.PRESENT
            waits = saved.waits or not saved.process
            member.due = now if waits and member.wanted else None
            if saved.process and saved.code is None:
                member.process, member.started = self._process_of(member), now
                member.handle = self.engine.adopt(member.process, saved.record, self._ended)
                member.handle.resume()  # the last master may have died while the job was suspended
                adopted.append(member.name)
        self.logs.say(f"The master was restarted: generation {state.generation}, {len(adopted)} processes.")
        if self._rollback is not None:
            self._stop_for_rollback()
        for member in self.members:
            pending = member.code is not None and member.due is None and self._rollback is None
            if pending and member.code is not None and self._outcome is None:
                self._note_end(member, member.code)

    # Starting

    def _patience(self) -> float:
        """Seconds until there is something to do even without an event."""
        moments = [self._health.due, self._work_checked + _WORK_EVERY]
        moments += [member.due for member in self.members if member.due is not None]
        if self._verdict.due is not None:
            moments.append(self._verdict.due)
        if self._rollback is not None and not any(trainer.running for trainer in self._trainers):
            moments.append(self._rollback)
        return min(moments) - clock.now()

    def _start_due(self) -> None:
        now = clock.now()
        if (cause := self._verdict.overdue()) is not None:
            self._react(*cause)
        due = self._rollback is not None and self._rollback <= now
        if due and not any(trainer.running for trainer in self._trainers):
            self._roll_back()
        self._start([member for member in self.members if member.due is not None and member.due <= now])

    def _roll_back(self) -> None:
        self._rollback = None
        self.state.generation += 1
        self.registry.begin_generation(self.state.generation)
        self.logs.say(f"Generation {self.state.generation} begins.")
        self._start(
            [
                member
                for member in self.members
                if member.wanted
                and not member.running
                and (not member.role.restarts_alone or (member.role.finishes and member.code == 0))
            ]
        )

    def _start(self, members: Iterable[ManagedProcess]) -> None:
        started = [(member, self._start_one(member)) for member in members]
        for member, handle in started:
            if handle is not None:
                pid = handle.pid  # none while it waits for room, or if it could not be started
                process = "no process yet" if pid is None else f"process {pid}"
                self.logs.say(f"Started {member.name}, {process}.")

    def _start_one(self, member: ManagedProcess) -> Handle | None:
        self.registry.forget(member.role, member.index)  # the address of its last process
        member.restarted = bool(member.token)
        member.token, member.generation = secrets.token_hex(8), self.state.generation
        member.process, member.handle = self._process_of(member), None
        member.code, member.due, member.started, member.stalled = None, None, clock.now(), False
        member.registration, member.awaited = Registration.NONE, False
        self._save()  # a master that is killed now leaves a process that the next one can find
        self.logs.begin(member.name)
        try:
            member.handle = self.engine.start(member.process, self._ended)
        except OSError as error:  # such as a full disk
            self.logs.write(member.name, f"error: {member.name} could not be started: {error}.")
            self._ended(member.process, TEMPORARY)
        self._save()
        return member.handle

    def _process_of(self, member: ManagedProcess) -> Process:
        environment = environment_of(
            self.spec,
            member.role,
            member.index,
            registry=self.registry.address,
            generation=member.generation,
            owner=self.owner,
            process=member.token,
        )
        return Process(member.role, member.index, self.commands[member.role], environment)
