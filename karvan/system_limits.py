"""The system's limits for a process (`ulimit`), and what the processes of a job need at least.

Too few open files or too little address space end a process somewhere inside a library, with an error that
names neither. So programs that start a job raise their own limits as far as they may, and refuse to start if
that is not enough. The processes that they start inherit the limits.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FILES, _FILES_PER_PROCESS = 96, 16  # for the process itself, and in addition for each process of its job
_ADDRESS_SPACE = 6 << 30  # bytes; torch, Arrow and their threads reserve 3 to 5 GiB before the first row
_THREADS = 100  # of one process
_CONTAINER_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class LimitError(RuntimeError):
    """The system allows a process less than the job needs."""


@dataclass(frozen=True)
class Limit:
    """A limit of the system: its value, the highest possible value, and what a job needs; None: no limit."""

    name: str
    kind: int
    flag: str  # of the shell's ulimit
    unit: int  # how many of the system's units one unit of that flag is
    soft: int | None
    hard: int | None
    needed: int

    @property
    def enough(self) -> bool:
        """Whether a process may have what the job needs, once the limit is raised."""
        return self.hard is None or self.hard >= self.needed

    def text(self, value: int | None) -> str:
        """A value of this limit in readable form."""
        if value is None:
            return "unlimited"
        return f"{value / (1 << 30):.1f} GiB" if self.kind == resource.RLIMIT_AS else f"{value:,}"

    @property
    def advice(self) -> str:
        """How to raise it."""
        command = f"ulimit -H{self.flag} {-(-self.needed // self.unit)}"
        return f"Raise it: {command} (as root), or in the settings of the container."

    def raise_soft(self) -> None:
        """Let this process, and those that it starts, use what the hard limit allows."""
        if self.soft is not None and self.soft < self.needed:
            hard = resource.RLIM_INFINITY if self.hard is None else self.hard
            resource.setrlimit(self.kind, (hard, hard))


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has, its container and its limit allow."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    bounds = [int(lines.get("MemAvailable", lines["MemTotal"]).split()[0]) << 10]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        bounds.append(max(0, soft - used))
    for limit, usage in _CONTAINER_FILES:
        with suppress(OSError, ValueError):  # there is another kind of container, or no limit
            bounds.append(max(0, int(Path(limit).read_text()) - int(Path(usage).read_text())))
    return min(bounds)


def limits(processes: int = 1) -> list[Limit]:
    """The limits that matter to a job of this many processes on this machine."""
    return [
        _limit("open files", resource.RLIMIT_NOFILE, "n", 1, _FILES + _FILES_PER_PROCESS * processes),
        _limit("address space", resource.RLIMIT_AS, "v", 1024, _ADDRESS_SPACE),
        _limit("processes and threads", resource.RLIMIT_NPROC, "u", 1, _THREADS * processes),
    ]


def require_limits(processes: int = 1) -> None:
    """Raise this process's limits to what a job of this many processes needs; a LimitError if it may not."""
    for limit in limits(processes):
        if not limit.enough:
            job = "A job of 1 process" if processes == 1 else f"A job of {processes} processes"
            raise LimitError(
                f"{job} expects a limit of at least "
                f"{limit.text(limit.needed)} for {limit.name}, got {limit.text(limit.hard)}. {limit.advice}"
            )
        limit.raise_soft()


def forbid_core_dumps() -> None:
    """Turn core dumps off in this process, and in those that it starts: its memory holds a secret.

    The limit is 1 byte, because with 0 Linux still gives the memory to a program that collects core dumps.
    Only the soft limit changes: a program may raise it again. PR_SET_DUMPABLE would also close /proc/PID to
    processes of the same user, among them debuggers and those that read a token from `private_file`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if soft != 1 and hard != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (1, hard))


def _limit(name: str, kind: int, flag: str, unit: int, needed: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    if kind == resource.RLIMIT_NPROC and os.geteuid() == 0:
        soft = hard = None  # the system does not limit root
    return Limit(name, kind, flag, unit, soft, hard, needed)
