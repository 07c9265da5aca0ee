"""The local engine: processes on this machine.

Each process leads a session of its own. So Ctrl-C on the terminal reaches the launcher alone, which stops the
others in order, and a kill reaches the processes that a role has started. When the launcher dies, the kernel
kills the roles (`tied.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from karvan.launch import tied
from karvan.launch.engine import Process
from karvan.launch.environment import NAMES, NOT_PASSED_ON, TORCH_NAMES

_LONGEST_LINE = 1 << 16  # bytes; what is longer is cut, so that no process fills our memory
_LAST_LINES = 5.0  # seconds that the last lines of a process that has ended may take


class LocalEngine:
    """Runs processes here; `write(name, line)` gets their output."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write

    def start(self, process: Process, ended: Callable[[Process, int], None]) -> LocalHandle:
        """Start a process."""
        # A launcher may itself run in a job's process, whose environment is not that of ours.
        without = (*NAMES, *TORCH_NAMES, *NOT_PASSED_ON)
        here = {name: value for name, value in os.environ.items() if name not in without}
        return LocalHandle(process, {**here, "PYTHONUNBUFFERED": "1"}, self._write, ended)


class LocalHandle:
    """A process of this machine, with a thread that reads its output and one that waits for its end."""

    def __init__(
        self,
        process: Process,
        environment: dict[str, str],
        write: Callable[[str, str], None],
        ended: Callable[[Process, int], None],
    ) -> None:
        self._process = process
        self._write = write
        self._ended = ended
        self._lock = threading.Lock()  # signals are sent only while the number is surely that of the process
        self._code: int | None = None
        self._told = threading.Event()
        self._popen = subprocess.Popen(
            [sys.executable, "-IS", str(Path(tied.__file__)), str(os.getpid()), *process.command],
            env={**environment, **process.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"{process.name} output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name=f"{process.name} end", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it has ended and its output was read."""
        self._told.wait(timeout)
        return self._code

    def stop(self) -> None:
        """SIGTERM to the process alone, which knows best what to do with those that it has started."""
        with self._lock:
            if self._code is None:
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the process and those that it has started."""
        with self._lock:
            if self._code is None:
                self._signal_group(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """SIGQUIT to the process alone."""
        with self._lock:
            if self._code is None:
                os.kill(self.pid, signal.SIGQUIT)

    def suspend(self) -> None:
        """SIGSTOP to the process and those that it has started."""
        with self._lock:
            if self._code is None:
                self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to them."""
        with self._lock:
            if self._code is None:
                self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _watch(self) -> None:
        # The process stays a zombie here, so that its number stays its own until the lock is taken.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._signal_group(signal.SIGKILL)  # what it has left behind
            self._code = self._popen.wait()
        self._reader.join(_LAST_LINES)
        self._told.set()
        self._ended(self._process, self._code)

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as output:
            while line := output.readline(_LONGEST_LINE):
                self._write(self._process.name, line.decode(errors="replace").rstrip("\r\n"))
