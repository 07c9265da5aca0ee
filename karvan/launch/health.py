"""Which processes of a job are not well, and what is done about it: they are killed, and so die."""

from __future__ import annotations

from typing import Protocol

from karvan.clock import clock
from karvan.launch.logs import Logs
from karvan.launch.processes import ManagedProcesses, kill


class HealthSource(Protocol):
    """Who knows which roles are well: the registry."""

    def healthy(self, role: str, index: int) -> bool | None:
        """Whether a role does what it should; None if nothing is known of it."""


class HealthCheck:
    """Looks after the processes every `every` seconds; those that were started lately are left alone.

    settle: seconds after its start in which nobody is asked whether a process is healthy.
    """

    def __init__(
        self,
        members: ManagedProcesses,
        source: HealthSource,
        logs: Logs,
        *,
        every: float,
        settle: float,
    ) -> None:
        self._members = members
        self._source = source
        self._logs = logs
        self._every = every
        self._settle = settle
        self._checked = 0.0

    @property
    def due(self) -> float:
        """When the next check is."""
        return self._checked + self._every

    def check(self) -> None:
        """Kill who is not healthy, if a check is due."""
        now = clock.now()
        if now < self.due:
            return
        self._checked = now
        for member in self._members:
            if not member.running or now < member.started + self._settle:
                continue
            if self._source.healthy(member.role, member.index) is False:
                self._logs.tell(f"{member.name} does not answer any more; it is killed.")
                member.started = now  # its death may take a moment
                kill([member])
