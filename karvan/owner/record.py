"""`OwnerRecord`: who owns a folder, as its lease file says, and whether that process still runs.

A process is identified by its number and its start time, since numbers are reused. The numbers are valid only
on the machine, since its last boot, and in the PID namespace (container) of the process; anywhere else only
renewals of the lease show that the process runs.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import shlex
import socket
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Exceptions raised for a folder that another run owns.


class OwnerError(RuntimeError):
    """Another run trains in the folder; the text says which one, since when, and what to do."""


class LeaseLostError(OwnerError):
    """Another run has taken the folder over while this one was paused for long."""


_LONGEST_COMMAND = 300
_CREDENTIALS = re.compile(r"://[^/@\s]+@")  # of a URL


@dataclass(frozen=True)
class OwnerRecord:
    """An owner. id is random; machine identifies where pid and start are valid."""

    id: str
    host: str
    machine: str
    pid: int
    start: str
    user: str
    command: str
    taken: str  # wall-clock time, for error messages
    seconds: float  # without a renewal after which others may take over
    renewals: int = 0

    @classmethod
    def of_this_process(cls, seconds: float, id: str = "") -> OwnerRecord:
        """A new record of this process; id: that of the process of which it is the successor."""
        pid = os.getpid()
        return cls(
            id=id or secrets.token_hex(16),
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            start=_start_of(pid) or "",
            user=_user(),
            command=_CREDENTIALS.sub("://", shlex.join(sys.orig_argv))[:_LONGEST_COMMAND],
            taken=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            seconds=seconds,
        )

    @classmethod
    def parse(cls, content: bytes) -> OwnerRecord | None:
        """The record in a lease file; None if it is incomplete or not a lease."""
        try:
            values: dict[str, Any] = json.loads(content)
            kinds: dict[str, Any] = {"pid": int, "renewals": int, "seconds": (int, float)}
            fields = cls.__dataclass_fields__
            if not all(isinstance(values[name], kinds.get(name, str)) for name in fields):
                return None
            record = cls(**{name: values[name] for name in fields})
        except (ValueError, KeyError, TypeError):
            return None
        return record if 0 < record.seconds < 1e6 else None

    def is_process(self, other: OwnerRecord) -> bool:
        """Whether another record is of the same process, or an earlier renewal of it."""
        return (self.id, self.machine, self.pid, self.start) == (
            *(other.id, other.machine, other.pid, other.start),
        )

    def content(self) -> bytes:
        """For a lease file; of the same length after any renewal, so that it is overwritten in place."""
        text = json.dumps({**asdict(self), "renewals": 0}, indent=1, ensure_ascii=True)
        return text.replace('"renewals": 0', f'"renewals": {self.renewals:>10d}').encode() + b"\n"

    def state(self) -> str:
        """The state of its process: "running", "stopped", "gone", or "unknown" (on another machine)."""
        if self.machine != _machine():
            return "unknown"
        if not self.start or _start_of(self.pid) != self.start:
            return "gone" if self.start else "unknown"
        return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(_status(self.pid), "running")

    def __str__(self) -> str:
        where = f"process {self.pid} of {self.user} on {self.host}, since {self.taken}"
        return f"{where} ({self.command})"


def _machine() -> str:
    """The scope in which process numbers are valid: the machine since its boot, and the PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {os.uname().sysname}"


def _start_of(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if there is no such process."""
    fields = _stat_of(pid)
    return fields[19] if fields is not None else None


def _status(pid: int) -> str:
    fields = _stat_of(pid)
    return fields[0] if fields is not None else "X"


def _stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name of the program, which may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in containers
        return f"uid {os.geteuid()}"
