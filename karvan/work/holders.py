"""The names under which processes of a launched job hold tasks, known to them and to the master alike."""

from __future__ import annotations

from karvan.job.roles import Role


def holder_of(role: Role, index: int, process: str, part: str = "") -> str:
    """The holder's name of a process, by its KARVAN_PROCESS; part: names one of several in it."""
    return f"{role}-{index} process {process} {part}".rstrip()


def is_of_process(holder: str, process_holder: str) -> bool:
    """Whether a holder is this process, or a part of it."""
    return holder == process_holder or holder.startswith(f"{process_holder} ")


def process_of(holder: str) -> str:
    """The name of the process that a holder is, or is a part of."""
    return " ".join(holder.split(" ", 3)[:3])
