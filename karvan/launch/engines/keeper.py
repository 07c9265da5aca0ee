"""The keeper of a role's process: starts it, forwards signals, and ends all its descendants.

    python -I -S keeper.py CONTROL STATUS

CONTROL and STATUS are the numbers of two pipes. The launcher writes to CONTROL, first the command and its
environment as JSON, after its length in eight hexadecimal digits, then one letter for each request:

    t   SIGTERM to the process                    s   SIGSTOP to the process and all that it has started
    q   SIGQUIT to the process                    c   SIGCONT to all of them
    k   SIGKILL to all of them

The keeper writes two lines of JSON to STATUS: the process's id when it has started, and its exit code,
minus the signal if one killed it, when it has ended and everything that it had started is gone.

**The launcher dies**, also by kill -9: CONTROL is closed, and the keeper kills all. **The process dies or
ends**: the keeper kills what it has left behind. That includes processes that have moved to their own session
or have lost their parents: the kernel makes the keeper their parent (a "subreaper"). **The keeper dies**: the
kernel kills the process, and the launcher counts it as killed.

Requests go through the keeper, so that no signal reaches another process that got the id of one that has
ended. This is a separate program that imports nothing from Karvan: it has to be small and to start quickly,
and no Python may run between fork and exec of a launcher that has threads.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TO_PROCESS = {ord("t"): signal.SIGTERM, ord("q"): signal.SIGQUIT}
_TO_ALL = {ord("s"): signal.SIGSTOP, ord("c"): signal.SIGCONT, ord("k"): signal.SIGKILL}
# A service manager that signals the entire process tree reaches the process, too.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LENGTH = 8
_GONE_WITHIN = 10.0  # seconds; a process inside of a system call that does not end is left to the kernel


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def start(command: list[str], environment: dict[str, str]) -> int:
    """Start the process in its own session; returns its id."""
    keeper = os.getpid()
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python itself
            signal.signal(ignored, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died before the call above
            os._exit(1)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}.\n".encode())
    finally:
        os._exit(1)


def descendants() -> list[int]:
    """All processes below this one, including those that lost their parents."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as stat:
                children.setdefault(int(stat.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def signal_all(number: signal.Signals) -> None:
    """Send a signal to all descendants."""
    for process in descendants():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def reap(process: int) -> None:
    """Reap orphans that have ended; not the process itself, so that its id is not reused."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == process:
                return
            os.waitpid(ended.si_pid, 0)


def run(process: int, control: int) -> None:
    """Serve requests until the process or the launcher has ended."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for passed in _PASSED_ON:
        signal.signal(passed, lambda number, frame: os.kill(process, number))
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    waiting.register(woken, select.POLLIN)
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        ready = dict(waiting.poll())
        if control in ready:
            requests = os.read(control, 64)
            for letter in requests:
                if letter in _TO_PROCESS:
                    os.kill(process, _TO_PROCESS[letter])
                elif letter in _TO_ALL:
                    signal_all(_TO_ALL[letter])
            if not requests:
                return
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
        reap(process)


def finish(process: int) -> int:
    """Kill everything that is left; returns the exit code of the process."""
    until = time.monotonic() + _GONE_WITHIN
    code = -int(signal.SIGKILL)
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == process:
                code = os.waitstatus_to_exitcode(status)
            if not ended:
                signal_all(signal.SIGKILL)
                time.sleep(0.002)
    return code


def _read(control: int, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = os.read(control, size - len(read))
        if not piece:  # the launcher is gone
            sys.exit(1)
        read += piece
    return read


def main(control: int, status: int) -> None:
    """Run one process."""
    os.set_inheritable(control, False)
    os.set_inheritable(status, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    size = _read(control, _LENGTH)
    request = json.loads(_read(control, int(size, 16)))
    process = start(request["command"], request["environment"])
    with suppress(BrokenPipeError):
        os.write(status, f"{json.dumps({'pid': process})}\n".encode())
        run(process, control)
    code = finish(process)
    with suppress(BrokenPipeError):
        os.write(status, f"{json.dumps({'code': code})}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
