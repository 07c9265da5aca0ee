"""The interface of engines: an engine starts processes somewhere and reports when they have ended.

An engine knows nothing about jobs: the supervisor decides which process runs when, and what its death means
(`karvan/launch/supervisor.py`). The output of a process goes to the log line by line, under the
process's name.

Processes outlive the master that started them. It stores the `record` of each, and if it dies, the next
master adopts them. The master itself is a process that the launcher starts, with role `master`: an engine
restarts one that dies, until it has ended for good.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from karvan.errors import TEMPORARY
from karvan.job.roles import Role, start_order

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec, Replicas


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


Ended = Callable[[Process, int], None]


class Handle(ABC):
    """A process that was started; `ended` is called with it and its exit code, once its output was read."""

    def __init__(self, process: Process, ended: Ended) -> None:
        self._process = process
        self._ended = ended
        self._lock = threading.Lock()
        self._code: int | None = None
        self._started = threading.Event()
        self._reported = threading.Event()

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Its process id, if the engine has one."""

    @property
    @abstractmethod
    def record(self) -> dict[str, Any]:
        """What another master needs to find the process: values that JSON can express."""

    @abstractmethod
    def ask(self, request: str) -> None:
        """Ask it for one of the methods below, by its name; nothing happens if it has ended."""

    def poll(self) -> int | None:
        """Its exit code, minus the signal if one killed it; None while it runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it has ended and its output was read, at most `timeout` seconds; then as `poll`."""
        self._reported.wait(timeout)
        return self._code

    def stop(self) -> None:
        """Ask it to end, with SIGTERM to the process alone, which stops those that it has started as needed.

        One that waits for room does not start any more.
        """
        self.ask("stop")

    def interrupt(self) -> None:
        """Ask it to end as Ctrl-C does, with SIGINT: a master kills its job the second time."""
        self.ask("interrupt")

    def kill(self) -> None:
        """End it at once, with all processes that it has started itself."""
        self.ask("kill")

    def dump_stacks(self) -> None:
        """Ask it, with SIGQUIT, to write the stacks of its threads; kills a process without a handler."""
        self.ask("dump_stacks")

    def suspend(self) -> None:
        """Stop it, with all processes that it has started itself, until `resume`.

        A master gets SIGTSTP: it stops the processes of its job, and then itself.
        """
        self.ask("suspend")

    def resume(self) -> None:
        """Let it and the others continue."""
        self.ask("resume")


class Engine(Protocol):
    """Runs processes."""

    def start(self, process: Process, ended: Ended) -> Handle:
        """Start a process. `ended` is called once, from any thread, with the exit code, when the process
        has ended and its last line is in the log.
        """

    def adopt(self, process: Process, record: Mapping[str, Any], ended: Ended) -> Handle:
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


# `Needs`: what a process of a role needs of a machine, and whether one machine has it.


@dataclass(frozen=True)
class Needs:
    """What one process needs; memory is in bytes, and `resources` are custom ones of a cluster."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, section: Replicas) -> Needs:
        """As a job says; a process needs a CPU for each of its threads if the job does not say otherwise."""
        cpus = float(section.threads or 1) if section.cpus is None else section.cpus
        return cls(cpus, section.gpus or 0.0, section.memory or 0, dict(section.resources))

    def amounts(self) -> dict[str, float]:
        """By the names that Ray has for them; only those that are needed."""
        all_of_them = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory), **self.resources}
        return {name: amount for name, amount in all_of_them.items() if amount}

    def __str__(self) -> str:
        return ", ".join(amount_text(name, amount) for name, amount in self.amounts().items())


def amount_text(name: str, amount: float) -> str:
    """ "2 CPU", "4 GiB memory"."""
    return f"{amount / 2**30:.3g} GiB memory" if name == "memory" else f"{amount:g} {name}"


def needs_by_role(spec: JobSpec) -> dict[Role, Needs]:
    """What each process of each role needs."""
    return {role: Needs.of(spec.of_role(role)) for role in start_order()}


def total_needs(spec: JobSpec) -> Needs:
    """What all processes that a job may have need together, apart from custom resources."""
    members = [(spec.of_role(role).most, needs) for role, needs in needs_by_role(spec).items()]
    return Needs(
        sum(count * needs.cpus for count, needs in members),
        sum(count * needs.gpus for count, needs in members),
        sum(count * needs.memory for count, needs in members),
    )


def check_machine(spec: JobSpec) -> None:
    """A ValueError if the job says that it needs more than this machine has.

    CPUs count only if the job asks for them by `cpus`: more processes than CPUs are slow, but not wrong.
    """
    for role in start_order():
        if spec.of_role(role).resources:
            raise ValueError(
                f"roles.{role.section}.resources names resources of a cluster's nodes, but this machine "
                "alone has none: expected --engine ray with the --address of a running cluster."
            )
    cpus = sum(spec.of_role(role).most * (spec.of_role(role).cpus or 0.0) for role in start_order())
    total = total_needs(spec)
    wanted = ("cpus", "CPU", cpus), ("gpus", "GPU", total.gpus), ("memory", "memory", total.memory)
    for key, name, amount in wanted:
        if amount and amount > (has := _HAS[key]()):
            raise ValueError(
                f"The job's roles need {amount_text(name, amount)} together (roles.*.{key}), but this "
                f"machine has {amount_text(name, has)}. Reduce {key} or replicas, or use --engine ray with "
                "the --address of a cluster."
            )


def _gpus() -> float:
    import torch  # only for jobs that ask for GPUs

    return float(torch.cuda.device_count())


_HAS: dict[str, Callable[[], float]] = {
    "cpus": lambda: float(len(os.sched_getaffinity(0))),
    "gpus": _gpus,
    "memory": lambda: float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
}
