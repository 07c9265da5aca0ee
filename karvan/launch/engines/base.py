"""The interface of engines: an engine starts processes somewhere and reports when they have ended.

An engine knows nothing about jobs: the supervisor decides which process runs when, and what its death means
(`karvan/launch/supervision/supervisor.py`). The output of a process goes to the log line by line, under the
process's name.

Processes outlive the master that started them. It stores the `record` of each, and if it dies, the next
master adopts them. The master itself is a process that the launcher starts, with role `master`: an engine
restarts one that dies, until it has ended for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from karvan.exit_codes import TEMPORARY
from karvan.job.roles import Role


@dataclass(frozen=True, eq=False)
class Process:
    """A process to run; two with equal fields are still two processes."""

    role: Role
    index: int
    command: tuple[str, ...]
    environment: Mapping[str, str]  # besides that of the machine it runs on

    @property
    def name(self) -> str:
        """Its name in logs."""
        return name_of(self.role, self.index)


class Handle(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int | None:
        """Its process id, if the engine has one."""

    @property
    def record(self) -> dict[str, Any]:
        """What another master needs to find the process: values that JSON can express."""

    def poll(self) -> int | None:
        """Its exit code, minus the signal if one killed it; None while it runs."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end, at most `timeout` seconds; then the same as `poll`."""

    def stop(self) -> None:
        """Ask it to end, with SIGTERM. Does nothing if it has ended."""

    def interrupt(self) -> None:
        """Ask it to end as Ctrl-C does, with SIGINT: a master kills its job the second time."""

    def kill(self) -> None:
        """End it at once, with all processes that it has started itself."""

    def dump_stacks(self) -> None:
        """Ask it, with SIGQUIT, to write the stacks of its threads; kills a process without a handler."""

    def suspend(self) -> None:
        """Stop it, with all processes that it has started itself, until `resume`.

        A master gets SIGTSTP: it stops the processes of its job, and then itself.
        """

    def resume(self) -> None:
        """Let it and the others continue."""


class Engine(Protocol):
    """Runs processes."""

    def start(self, process: Process, ended: Callable[[Process, int], None]) -> Handle:
        """Start a process. `ended` is called once, from any thread, with the exit code, when the process
        has ended and its last line is in the log.
        """

    def adopt(
        self, process: Process, record: Mapping[str, Any], ended: Callable[[Process, int], None]
    ) -> Handle:
        """Take over a process that an earlier master started, by the `record` of its handle.

        The environment of the process is as if it were started now. The variables of a process that runs do
        not change, but where a master may be restarted on another machine, the engine tells it the address.

        The record is empty if that master died while it started the process, which then may or may not run.
        `ended` is called as in `start`, also if the process has ended in the meantime; if its exit code is
        unknown, with minus SIGKILL.
        """


def name_of(role: Role, index: int) -> str:
    """`trainer-0` and the like."""
    return f"{role}-{index}"


def end_text(code: int) -> str:
    """How a process has ended, as text."""
    if code >= 0:
        return f"ended with code {code}" + (" (a temporary failure)" if code == TEMPORARY else "")
    import signal

    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
