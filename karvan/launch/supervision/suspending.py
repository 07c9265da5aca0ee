"""Pauses of a job: Ctrl-Z, and a master that could not run for a while.

**Ctrl-Z** (SIGTSTP, which the launcher passes on to the master) stops all processes of the job, then the
master itself; then the launcher stops, so that the shell gets its terminal back. `fg`, `bg` or SIGCONT
continue the launcher, which continues the master, which continues the others. Connections between them stay
open, and their deadlines do not count the pause (`karvan.clock`). Timeouts of other libraries do:
torch's collectives fail if trainers wait in them at that moment and the pause is longer than their timeout
(`kv.connect`), and the job then rolls back.

**The master alone was stopped**, or the machine slept: heartbeats could not reach it. It logs this, and all
timeouts start again.
"""

from __future__ import annotations

import os
import signal
import threading

from karvan.clock import clock
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.supervision.processes import ManagedProcesses

_WRITE_WITHIN = (
    1.0  # seconds; a reader of the output, such as `tee`, may be stopped already by the same Ctrl-Z
)


class Suspension:
    """Suspends a job, and reports when its supervisor was asleep for more than `notice` seconds."""

    def __init__(self, members: ManagedProcesses, logs: MergedLogs, notice: float) -> None:
        self._members = members
        self._logs = logs
        self._notice = notice
        self._known = clock.paused

    def suspend(self) -> None:
        """Stop all processes and then this one; returns when it and the others have been continued."""
        self._members.suspend()
        writer = threading.Thread(target=self._logs.say, args=(SUSPENDED,), daemon=True)
        writer.start()
        writer.join(_WRITE_WITHIN)
        os.kill(os.getpid(), signal.SIGSTOP)
        clock.now()
        self._known = clock.paused
        self._members.resume()
        self._logs.say(RESUMED)

    def check(self) -> None:
        """Log it if this process could not run for a while."""
        clock.now()
        asleep = clock.paused - self._known
        self._known = clock.paused
        if asleep > self._notice:
            self._logs.say(
                f"The master or the machine was asleep for {asleep:.0f} s; missing heartbeats of that time "
                "do not count, and all timeouts start again."
            )


RESUMED = "Resumed: all processes continue, and all timeouts start again."
SUSPENDED = "Suspended: all processes of the job are stopped; `fg`, `bg` or SIGCONT continue them."
