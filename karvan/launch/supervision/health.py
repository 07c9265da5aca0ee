"""Finds unhealthy processes of a job and kills them, so that they are restarted.

A process is unhealthy if its heartbeats stop, if it is alive but blocks the others (`stalls.py`), or if it
does not finish its start. One that was present at a master that died, and does not come to the next one, has
stopped meanwhile. Before a process is killed it is asked for the stacks of its threads, with SIGQUIT; a
process that has joined the registry writes them even if its interpreter hangs. It is killed as soon as they
are in the log, or after some seconds if they do not come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from karvan.activity import ActivityReport
from karvan.clock import clock
from karvan.job.roles import Role
from karvan.launch.engines.base import Handle
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.supervision.processes import ManagedProcess, ManagedProcesses, Registration, kill
from karvan.launch.supervision.stalls import Activities, find_stalls

_STACKS_WITHIN = 5.0  # seconds
_STACKS_ENDED = 0.5  # seconds without another line after which they are complete


class HealthSource(Protocol):
    """Knows which roles are healthy: the registry."""

    def healthy(self, role: Role, index: int) -> bool | None:
        """Whether a role sends heartbeats; None if it is not known."""

    def activities(self) -> Mapping[tuple[Role, int], ActivityReport]:
        """The newest report of each role's heartbeats, by role and index."""


@dataclass
class _Condemned:
    """A process that was asked for its stacks, and will be killed."""

    member: ManagedProcess
    handle: Handle | None
    asked: float
    lines: int
    changed: float


class HealthCheck:
    """Checks the processes every `every` seconds, except those that were started recently.

    settle: seconds after its start in which the health of a process is not checked. return_within: seconds in
    which the processes of a master that died come to this one. start_within: seconds in which a process
    connects, or longer, if stall_timeout is longer. stall_timeout: seconds without progress after which a
    process is killed; 0: never.
    """

    def __init__(
        self,
        members: ManagedProcesses,
        source: HealthSource,
        logs: MergedLogs,
        *,
        every: float,
        settle: float,
        return_within: float,
        start_within: float,
        stall_timeout: float,
    ) -> None:
        self._members = members
        self._source = source
        self._logs = logs
        self._every = every
        self._settle = settle
        self._return = return_within
        self._start = max(start_within, stall_timeout)
        self._stall_timeout = stall_timeout
        self._checked = 0.0
        self._condemned: dict[str, _Condemned] = {}

    @property
    def due(self) -> float:
        """The time of the next check."""
        return self._checked + self._every

    def check(self) -> None:
        """Find unhealthy processes, if a check is due, and kill them."""
        now = clock.now()
        if now < self.due:
            return
        self._checked = now
        activities = self._source.activities()
        for member in self._members:
            if not member.running:
                continue
            healthy = self._source.healthy(member.role, member.index)
            member.note_health(healthy)
            if now < member.started + self._settle or member.name in self._condemned:
                continue
            missing = member.awaited and now >= member.started + self._return
            if healthy is False or missing:
                self._logs.say(f"{member.name} does not answer any more; it is killed.")
                self._condemn(member, activities)
        if self._stall_timeout:
            self._find_stalled(activities)
            self._find_late()
        self._kill_condemned()

    def _find_stalled(self, activities: Activities) -> None:
        running: dict[tuple[Role, int], ManagedProcess] = {
            (each.role, each.index): each for each in self._members if each.running
        }
        settled = clock.now() - self._settle
        known = {
            key: report
            for key, report in activities.items()
            if key in running
            and (report.progress or running[key].started <= settled)  # otherwise it may still be starting
        }
        for stall in find_stalls(known, self._stall_timeout):
            member = running[stall.role, stall.index]
            if member.name not in self._condemned:
                stacks = "its stacks follow, then it is killed" if stall.report.dumps else "it is killed"
                self._logs.say(f"{stall}; {stacks} (stall_timeout).")
                member.stalled = True
                self._condemn(member, activities)

    def _find_late(self) -> None:
        """Find processes that do not finish their start, if others of their role show that they connect."""
        for member in [each for each in self._members if each.starting]:
            if member.waits_for_room:
                member.started = clock.now()  # its start has not begun
            late = clock.now() >= member.started + self._start
            expected = member.role.connects or any(
                each.running and each.registration is not Registration.NONE
                for each in self._members.of(member.role)
            )
            if late and expected and member.name not in self._condemned:
                text = f"has not connected {self._start:g} s after its start; it is killed"
                self._logs.say(f"{member.name} {text} (stall_timeout).")
                member.stalled = True
                self._condemn(member, {})

    def _condemn(self, member: ManagedProcess, activities: Activities) -> None:
        report = activities.get((member.role, member.index))
        asked = report is not None and report.dumps and member.handle is not None
        lines, now = self._logs.lines(member.name), clock.now()
        if asked and member.handle is not None:
            member.handle.dump_stacks()
        self._condemned[member.name] = _Condemned(
            member, member.handle, now if asked else now - _STACKS_WITHIN, lines, now
        )

    def _kill_condemned(self) -> None:
        now = clock.now()
        for name, each in list(self._condemned.items()):
            lines = self._logs.lines(name)
            if lines > each.lines:
                each.lines, each.changed = lines, now
            complete = each.changed > each.asked and now >= each.changed + _STACKS_ENDED
            if not each.member.running or each.member.handle is not each.handle:
                del self._condemned[name]
            elif complete or now >= each.asked + _STACKS_WITHIN:
                kill([each.member])  # its death may take a moment
