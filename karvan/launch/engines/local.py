"""The local engine: processes on this machine.

Each process has its own session. So Ctrl-C on the terminal reaches only the launcher, which stops the others
in order. Each process has a keeper (`keeper.py`), which passes a kill on to all that the process has started,
and ends all of them when the launcher dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from karvan.job.environment import LAUNCHED, NOT_PASSED_ON, TORCH_NAMES
from karvan.launch.engines import keeper
from karvan.launch.engines.base import Process

_LONGEST_LINE = 1 << 16  # bytes; longer lines are cut, so that no process fills the launcher's memory
_LAST_LINES = 5.0  # seconds that the last lines of a process that has ended may take


class LocalEngine:
    """Runs processes on this machine; `write(name, line)` receives their output."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write

    def start(self, process: Process, ended: Callable[[Process, int], None]) -> LocalHandle:
        """Start a process."""
        # A launcher may itself run in a process of another job, whose variables must not be passed on.
        without = (*LAUNCHED, *TORCH_NAMES, *NOT_PASSED_ON)
        inherited = {name: value for name, value in os.environ.items() if name not in without}
        return LocalHandle(process, {**inherited, "PYTHONUNBUFFERED": "1"}, self._write, ended)


class LocalHandle:
    """A process of this machine and its keeper, with a thread that reads the process's output and one that
    waits for its end.
    """

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
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._code: int | None = None
        self._started = threading.Event()
        self._reported = threading.Event()
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-IS", str(Path(keeper.__file__)), str(control), str(status)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(control, status),
            )
        finally:
            os.close(control)
            os.close(status)
        request = {"command": process.command, "environment": {**environment, **process.environment}}
        self._reader = threading.Thread(target=self._read, name=f"{process.name} output", daemon=True)
        self._reader.start()
        threading.Thread(
            target=self._watch, args=(json.dumps(request).encode(),), name=f"{process.name} end", daemon=True
        ).start()

    @property
    def pid(self) -> int | None:
        """Its process id, once it has started; None if it could not be started."""
        self._started.wait()
        return self._pid

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it has ended and its output was read."""
        self._reported.wait(timeout)
        return self._code

    def stop(self) -> None:
        """SIGTERM to the process alone, which stops those that it has started as it needs."""
        self._ask(b"t")

    def kill(self) -> None:
        """SIGKILL to the process and all that it has started."""
        self._ask(b"k")

    def dump_stacks(self) -> None:
        """SIGQUIT to the process alone."""
        self._ask(b"q")

    def suspend(self) -> None:
        """SIGSTOP to the process and all that it has started."""
        self._ask(b"s")

    def resume(self) -> None:
        """SIGCONT to them."""
        self._ask(b"c")

    def _ask(self, request: bytes) -> None:
        self._started.wait()
        with self._lock, suppress(BrokenPipeError):
            if self._code is None:
                os.write(self._control, request)

    def _watch(self, request: bytes) -> None:
        with suppress(BrokenPipeError):
            _write_all(self._control, b"%08x" % len(request) + request)
        code = -int(signal.SIGKILL)  # if the keeper dies, and its process with it
        with open(self._status) as status:
            for line in status:
                message = json.loads(line)
                if "pid" in message:
                    self._pid = message["pid"]
                    self._started.set()
                code = message.get("code", code)
        self._started.set()
        self._popen.wait()
        with self._lock:
            self._code = code
            os.close(self._control)
        self._reader.join(_LAST_LINES)
        self._reported.set()
        self._ended(self._process, code)

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as output:
            while line := output.readline(_LONGEST_LINE):
                self._write(self._process.name, line.decode(errors="replace").rstrip("\r\n"))


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
