"""`ProcessLogs`: the logs of processes on other nodes, as files in the run folder of their job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from karvan.launch.engines.keeper import LOG_BYTES, RoleLog
from karvan.launch.engines.local import log_of


class ProcessLogs:
    """Writes the lines of processes to their logs, where the local engine has them, and passes them on."""

    def __init__(self, folder: Path, write: Callable[[str, str], None]) -> None:
        self._folder = folder
        self._write = write
        self._lock = threading.Lock()
        self._logs: dict[str, RoleLog] = {}

    def open(self, name: str) -> None:
        """Have a log of a process, which may never write a line."""
        with self._lock:
            self._log_of(name)

    def write(self, name: str, line: str) -> None:
        """Write a line of a process."""
        with self._lock:
            self._log_of(name).write(f"{line}\n".encode(errors="replace"))
        self._write(name, line)

    def _log_of(self, name: str) -> RoleLog:
        if name not in self._logs:
            path = log_of(self._folder, name)
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._logs[name] = RoleLog(str(path), LOG_BYTES)
        return self._logs[name]
