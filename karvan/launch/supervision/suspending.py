"""Pauses of a job: Ctrl-Z, and a launcher that could not run for a while.

**Ctrl-Z** (SIGTSTP) stops all processes of the job, then the launcher itself, so that the shell gets its
terminal back. `fg`, `bg` or SIGCONT continue the launcher, which continues the others. Connections between
them stay open, and their deadlines do not count the pause (`karvan.clock`). What others count is theirs:
torch's collectives give up when trainers wait in them at that moment and the pause is longer than their
timeout (`kv.connect`), and the job then rolls back.

**The launcher alone was stopped**, or the machine slept: nobody could tell it that they are alive. It says
so, and everybody has new time.
"""

from __future__ import annotations

import os
import signal
import threading

from karvan.clock import clock
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.supervision.processes import ManagedProcesses

_TELL_WITHIN = 1.0  # seconds; whoever reads our output may be stopped already, as `tee` is by the same Ctrl-Z


class Suspension:
    """Suspends a job, and notices when its supervisor was asleep, which is told from `notice` seconds on."""

    def __init__(self, members: ManagedProcesses, logs: MergedLogs, notice: float) -> None:
        self._members = members
        self._logs = logs
        self._notice = notice
        self._known = clock.paused

    def suspend(self) -> None:
        """Stop everybody and then this process; returns when it is continued, and so are the others."""
        self._members.suspend()
        said = threading.Thread(target=self._logs.tell, args=(_SUSPENDED,), daemon=True)
        said.start()
        said.join(_TELL_WITHIN)
        os.kill(os.getpid(), signal.SIGSTOP)
        clock.now()
        self._known = clock.paused
        self._members.resume()
        self._logs.tell("Resumed: all processes continue, and everybody has new time.")

    def check(self) -> None:
        """Say so if this process could not run for a while."""
        clock.now()
        asleep = clock.paused - self._known
        self._known = clock.paused
        if asleep > self._notice:
            self._logs.tell(
                f"The launcher or the machine was asleep for {asleep:.0f} s; nobody is blamed for being "
                "silent meanwhile, everybody has new time."
            )


_SUSPENDED = "Suspended: all processes of the job are stopped; `fg`, `bg` or SIGCONT continue them."
