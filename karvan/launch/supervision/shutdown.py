"""How a job ends: role by role, in the reverse of the order in which they start.

Each process gets SIGTERM, and is killed if it takes too long. Trainers then save a checkpoint, for which they
need the others, so they are first. A second Ctrl-C kills all at once.
"""

from __future__ import annotations

import signal

from karvan.clock import clock
from karvan.job.roles import Role, start_order
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.supervision.events import EventQueue, ProcessEnded, StopRequested
from karvan.launch.supervision.processes import ManagedProcesses, kill

_GRACE_OF_OTHERS = 10.0  # only trainers have a checkpoint to save


class Shutdown:
    """Stops the processes of a job; trainers have `grace` seconds for a checkpoint."""

    def __init__(self, members: ManagedProcesses, events: EventQueue, logs: MergedLogs, grace: float) -> None:
        self._members = members
        self._events = events
        self._logs = logs
        self._grace = grace
        self._hurry = False

    def run(self) -> None:
        """Stop all."""
        for role in reversed(start_order()):
            self._stop(role)

    def _stop(self, role: Role) -> None:
        grace = self._grace if role.saves else min(self._grace, _GRACE_OF_OTHERS)
        if not self._hurry:
            for member in self._members.of(role):
                if member.running and member.handle is not None:
                    member.handle.stop()
            self._wait_for(role, grace)
        late = [member for member in self._members.of(role) if member.running]
        for member in late:
            self._logs.say(f"{member.name} is killed.")
        kill(late)
        self._wait_for(role, _GRACE_OF_OTHERS, even_in_hurry=True)

    def _wait_for(self, role: Role, seconds: float, *, even_in_hurry: bool = False) -> None:
        deadline = clock.now() + seconds
        while self._members.any_running(role) and (even_in_hurry or not self._hurry):
            event = self._events.get(deadline - clock.now())
            if isinstance(event, ProcessEnded):
                self._members.note_end(event.process, event.code)
            elif isinstance(event, StopRequested) and event.signal == signal.SIGINT:
                self._logs.say("Killing all.")
                self._hurry = True
                kill(self._members)
            elif event is None:
                return
