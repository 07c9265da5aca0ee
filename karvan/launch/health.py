"""Finds unhealthy processes of a job and kills them, so that they are restarted.

A process is unhealthy if its heartbeats stop, if it is alive but blocks the others, or if it
does not finish its start. One that was present at a master that died, and does not come to the next one, has
stopped meanwhile. Before a process is killed it is asked for the stacks of its threads, with SIGQUIT; a
process that has joined the registry writes them even if its interpreter hangs. It is killed as soon as they
are in the log, or after some seconds if they do not come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from karvan.activity import TRAINERS, ActivityReport
from karvan.clock import clock
from karvan.job.roles import Role
from karvan.launch.engines.base import Handle
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.processes import ManagedProcess, ManagedProcesses, Registration, kill

if TYPE_CHECKING:
    from karvan.discovery.registry import Registry

# Finds processes that are alive but make no progress and block the job, from their heartbeats.
#
#  a trainer                            is stalled if it has a task (fit, evaluate), has made no progress for
#                                         `stall_timeout` seconds, and does not wait for another role. One
#                                         that waits for other trainers is not stalled, as long as one of
#                                         them does not wait
#  a loader, an embedding worker, a     is stalled if it has made no progress for as long, another process
#    parameter server                     has waited for it for as long, and it waits for no process itself
#
# A process that waits for another one is blocked by it, and is not killed. A trainer without a task runs the
# user's code, which may take any time; so may a source that no process waits for. Parameter servers and
# embedding workers run no user code, so they have at most `SERVICE_TIMEOUT` seconds: less than the timeout of
# the calls that wait for them.


SERVICE_TIMEOUT = 240.0  # seconds

Activities = Mapping[tuple[Role, int], ActivityReport]


@dataclass(frozen=True)
class Stall:
    """A process that blocks the job, and the processes that wait for it."""

    role: Role
    index: int
    report: ActivityReport
    waiters: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name in logs."""
        return f"{self.role}-{self.index}"

    def __str__(self) -> str:
        task = f" in {self.report.task}" if self.report.task else ""
        waiters = f", and {_listed(self.waiters)} for it" if self.waiters else ""
        return f"{self.name} has made no progress for {self.report.idle:.0f} s{task}{waiters}"


def find_stalls(activities: Activities, timeout: float) -> list[Stall]:
    """The processes that block the others; none if all make progress, or wait."""
    stalls = []
    for key, report in activities.items():
        limit = timeout if key[0].runs_user_code else min(timeout, SERVICE_TIMEOUT)
        # Short calls to another process that are answered do not count as waiting for it.
        if report.idle < limit or any(seconds >= limit / 2 for seconds in report.waits.values()):
            continue
        if _waiters(activities, key, limit) if key[0].listens else report.task:
            stalls.append(Stall(*key, report, _waiters(activities, key, 0.0)))
    return stalls or _trainers_that_wait_for_each_other(activities, timeout)


def _waiters(activities: Activities, whom: tuple[Role, int], timeout: float) -> tuple[str, ...]:
    role, index = whom
    names = {f"{role}-{index}", TRAINERS} if role.is_rank else {f"{role}-{index}"}
    return tuple(
        f"{key[0]}-{key[1]}"
        for key, report in sorted(activities.items())
        if key != whom and any(report.waits.get(name, -1.0) >= timeout for name in names)
    )


def _trainers_that_wait_for_each_other(activities: Activities, timeout: float) -> list[Stall]:
    """All trainers, if each has only ever waited for the others."""
    trainers = {key: report for key, report in activities.items() if key[0].is_rank}
    stuck = [
        trainer.task and trainer.idle >= timeout and set(trainer.waits) <= {TRAINERS}
        for trainer in trainers.values()
    ]
    if len(trainers) < 2 or not all(stuck):
        return []
    return [Stall(*key, report, _waiters(activities, key, 0.0)) for key, report in trainers.items()]


def _listed(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return f"{names[0]} waits"
    return f"{', '.join(names[:-1])} and {names[-1]} wait"


_STACKS_WITHIN = 5.0  # seconds
_STACKS_ENDED = 0.5  # seconds without another line after which they are complete


@dataclass
class _Condemned:
    """A process that was asked for its stacks, and will be killed."""

    member: ManagedProcess
    handle: Handle | None
    asked: float
    lines: int
    changed: float


@dataclass(frozen=True)
class Timing:
    """Seconds. Delays double with every restart, and are random, so that not all restart at once."""

    backoff: float = 0.5
    check: float = 1.0  # between checks of health
    settle: float = 60.0  # after its start, in which the health of a process is not checked
    start: float = 60.0  # in which a process connects; as long as stall_timeout, if that is longer
    pause: float = 5.0  # of the master itself; longer ones are reported
    lost: float = (
        10.0  # without a heartbeat, after which a process counts as lost; trainers have six times as long
    )


@dataclass
class HealthCheck:
    """Checks the processes of a job, except those that were started recently.

    stall_timeout: seconds without progress after which a process is killed; 0: never.
    """

    members: ManagedProcesses
    registry: Registry
    logs: MergedLogs
    timing: Timing
    stall_timeout: float

    def __post_init__(self) -> None:
        self._return = max(self.timing.settle, self.timing.lost)  # in which processes come to another master
        self._start = max(self.timing.start, self.stall_timeout)
        self._checked = 0.0
        self._condemned: dict[str, _Condemned] = {}

    @property
    def due(self) -> float:
        """The time of the next check."""
        return self._checked + self.timing.check

    def check(self) -> None:
        """Find unhealthy processes, if a check is due, and kill them."""
        now = clock.now()
        if now < self.due:
            return
        self._checked = now
        activities = self.registry.activities()
        for member in self.members:
            if not member.running:
                continue
            healthy = self.registry.healthy(member.role, member.index)
            member.note_health(healthy)
            if now < member.started + self.timing.settle or member.name in self._condemned:
                continue
            missing = member.awaited and now >= member.started + self._return
            if healthy is False or missing:
                self.logs.say(f"{member.name} does not answer any more; it is killed.")
                self._condemn(member, activities)
        if self.stall_timeout:
            self._find_stalled(activities)
            self._find_late()
        self._kill_condemned()

    def _find_stalled(self, activities: Activities) -> None:
        running = {member.key: member for member in self.members if member.running}
        settled = clock.now() - self.timing.settle
        alive = {
            key: report
            for key, report in activities.items()
            if key in running
            and (report.progress or running[key].started <= settled)  # otherwise it may still be starting
        }
        for stall in find_stalls(alive, self.stall_timeout):
            member = running[stall.role, stall.index]
            if member.name not in self._condemned:
                stacks = "its stacks follow, then it is killed" if stall.report.dumps else "it is killed"
                self.logs.say(f"{stall}; {stacks} (stall_timeout).")
                member.stalled = True
                self._condemn(member, activities)

    def _find_late(self) -> None:
        """Find processes that do not finish their start, if others of their role show that they connect."""
        for member in [other for other in self.members if other.starting]:
            if member.waits_for_room:
                member.started = clock.now()  # its start has not begun
            late = clock.now() >= member.started + self._start
            expected = member.role.connects or any(
                member_.running and member_.registration is not Registration.NONE
                for member_ in self.members.of(member.role)
            )
            if late and expected and member.name not in self._condemned:
                text = f"has not connected {self._start:g} s after its start; it is killed"
                self.logs.say(f"{member.name} {text} (stall_timeout).")
                member.stalled = True
                self._condemn(member, {})

    def _condemn(self, member: ManagedProcess, activities: Activities) -> None:
        report = activities.get(member.key)
        asked = report is not None and report.dumps and member.handle is not None
        lines, now = self.logs.lines(member.name), clock.now()
        if asked and member.handle is not None:
            member.handle.dump_stacks()
        self._condemned[member.name] = _Condemned(
            member, member.handle, now if asked else now - _STACKS_WITHIN, lines, now
        )

    def _kill_condemned(self) -> None:
        now = clock.now()
        for name, condemned in list(self._condemned.items()):
            lines = self.logs.lines(name)
            if lines > condemned.lines:
                condemned.lines, condemned.changed = lines, now
            complete = condemned.changed > condemned.asked and now >= condemned.changed + _STACKS_ENDED
            if not condemned.member.running or condemned.member.handle is not condemned.handle:
                del self._condemned[name]
            elif complete or now >= condemned.asked + _STACKS_WITHIN:
                kill([condemned.member])  # its death may take a moment
