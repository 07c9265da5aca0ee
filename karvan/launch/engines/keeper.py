"""The keeper of a process: starts it, forwards signals, writes its log, and ends all its descendants.

    python -I -S keeper.py FOLDER LOCK [TEMPORARY]

The request is on stdin: eight hexadecimal digits, then JSON.

    FOLDER/control   a FIFO with one letter for each request of the master, which holds it open:
                       h   the master is there            s   SIGSTOP to the process and all it has started
                       t   SIGTERM to the process         c   SIGCONT to all of them
                       i   SIGINT to the process          k   SIGKILL to all of them
                       q   SIGQUIT to the process         z   SIGTSTP to the process
    FOLDER/alive     a file that is locked while the keeper lives, by the descriptor LOCK
    FOLDER/pid       the id of the process
    FOLDER/exit      its exit code, minus the signal if one killed it, once everything that it started is
                     gone; blank before

Requests go through the keeper, so that no signal reaches another process that got the id of one that has
ended. The keeper writes the id to its stdout as well, which the master reads once. Output of the process goes
through the keeper to the log. The log rotates: LOG, LOG.1 and LOG.2 have up to `log_bytes` each. A full disk
costs lines of it, but never an error in the process.

**The master dies**, also by kill -9: CONTROL is closed. The keeper waits for `away` seconds for another one,
which opens CONTROL and says h; then it kills all. **The process dies or ends**: the keeper kills what it has
left behind. That includes processes that have moved to their own session or have lost their parents: the
kernel makes the keeper their parent (a "subreaper"). **The keeper dies**: the kernel kills the process and
releases the lock, and the master counts it as killed, and kills what the process has started.

The master itself has a keeper, which differs in three ways. It restarts the process, up to `most` times
within `window` seconds, unless a file says that it has ended for good; the roles that the process has started
are left alone meanwhile. When the launcher dies, the process gets SIGTERM, and `away` seconds to end; with 0
it is killed, and without `away` nothing happens. Signals are held back until the process is ready for them.

A keeper that ends alone, without a master, or as that of a master without a launcher, removes FOLDER and
TEMPORARY, a folder around it. So does one whose master dies before the request was complete.

This is a separate program that imports nothing from Karvan: it has to be small and to start quickly, and no
Python may run between fork and exec of a master that has threads.
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
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TO_PROCESS = {
    ord("t"): signal.SIGTERM,
    ord("q"): signal.SIGQUIT,
    ord("i"): signal.SIGINT,
    ord("z"): signal.SIGTSTP,
}
_TO_ALL = {ord("s"): signal.SIGSTOP, ord("c"): signal.SIGCONT, ord("k"): signal.SIGKILL}
_HELLO = ord("h")
# A service manager that signals the entire process tree reaches the process, too.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP)
_LENGTH = 8
_GONE_WITHIN = 10.0  # seconds; a process inside of a system call that does not end is left to the kernel
_CHUNK = 1 << 16
_LONGEST_BACKOFF = 10.0
LOG_BYTES = 1 << 26  # of each file of a log
OLDER_LOGS = 2
_MOST_UNFINISHED = 1 << 20  # bytes of a line without an end, which stay in one file


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def start(
    command: list[str], environment: dict[str, str], output: int, ignored: set[signal.Signals], hold: bool
) -> int:
    """Start the process in its own session; returns its id. hold: signals wait until it unblocks them."""
    keeper = os.getpid()
    handled = {*_PASSED_ON, *_HELD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # none may be lost between fork and exec
    process = os.fork()
    if process:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return process
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in handled:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python itself
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before | set(_HELD) if hold else before)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died before the call above
            os._exit(1)
        os.dup2(output, 1)
        os.dup2(output, 2)
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
    numbers: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        numbers += below
        pending += below
    return numbers


def signal_all(number: signal.Signals) -> None:
    """Send a signal to all descendants."""
    for process in descendants():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


class RoleLog:
    """The log of a process: three files, of which PATH.2 is the oldest, each of up to `most` bytes.

    A file begins and ends with a line.
    """

    def __init__(self, path: str, most: int, mode: int = 0o600) -> None:
        self._path = path
        self._most = most
        self._mode = mode
        self._lost = 0
        self._is_whole = True  # whether the last line has its end
        self._open()

    def write(self, data: bytes) -> None:
        """Append; what the disk does not take is lost, and counted in a line once it takes more."""
        try:
            if self._lost:
                data = b"[%d bytes of output are lost: the log could not be written]\n%b" % (self._lost, data)
            self._lost = len(data) - self.append(data)
        except OSError:
            self._lost += len(data)

    def append(self, data: bytes) -> int:
        """Append; returns how much the disk has taken."""
        size, end = os.fstat(self._file).st_size, 0
        if size + len(data) > self._most:
            if not self._is_whole:
                end = data.rfind(b"\n") + 1
                os.write(self._file, data[:end])
            if self._is_whole or end or size > self._most + _MOST_UNFINISHED:
                self._rotate()
        if end < len(data):
            end += os.write(self._file, data[end:])
            self._is_whole = data.endswith(b"\n")
        return end

    def close(self) -> None:
        """Release the file."""
        os.close(self._file)

    def _rotate(self) -> None:
        for number in range(OLDER_LOGS, 0, -1):
            with suppress(FileNotFoundError):
                os.rename(
                    f"{self._path}.{number - 1}" if number > 1 else self._path, f"{self._path}.{number}"
                )
        os.close(self._file)
        self._is_whole = True
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self._mode)


class Keeper:
    """Runs one process; `run` returns its exit code."""

    def __init__(self, folder: str, request: dict[str, Any]) -> None:
        self._folder = folder
        self._request = request
        self._log = RoleLog(request["log"], request["log_bytes"])
        self._output, self._output_end = os.pipe()
        self._woken, wake = os.pipe()
        for descriptor in (self._output, self._woken, wake):
            os.set_blocking(descriptor, False)
        self._ignored = {
            number for number in (*_PASSED_ON, *_HELD) if signal.getsignal(number) == signal.SIG_IGN
        }
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for passed in _PASSED_ON:
            signal.signal(passed, lambda number, frame: self._send(signal.Signals(number)))
        self._process = 0  # none
        self._code = -int(signal.SIGKILL)
        self._over = False
        self._pending: list[signal.Signals] = []  # for the next process
        self._stopping = False  # whether every process gets SIGTERM
        self._starts: list[float] = []
        self._due: float | None = None  # when the process is restarted
        self._away: float | None = time.monotonic()  # since when there is no master
        self._control = self._open_control()
        self._poll = select.poll()
        for descriptor in (self._control, self._woken, self._output):
            self._poll.register(descriptor, select.POLLIN)

    def is_alone(self) -> bool:
        """Whether nobody will ask how the process has ended; for the time after that."""
        if self._away is None:
            self._take_requests()  # the master may have died while the process was ended
        until = self._unattended_until()
        return (until is not None and time.monotonic() >= until) or (
            "restart" in self._request and self._away is not None
        )

    def run(self) -> int:
        """Run the process until it has ended for good, with all that it has started."""
        self._start()
        while not self._over:
            ready = dict(self._poll.poll(self._patience()))
            if self._output in ready:
                self._copy_output()
            if self._control in ready:
                self._take_requests()
            if self._woken in ready:
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            self._reap()
            now = time.monotonic()
            if self._due is not None and now >= self._due and not self._over:
                self._start()
            until = self._unattended_until()
            if until is not None and now >= until:
                self._over = True
        return self._finish()

    def _start(self) -> None:
        request = self._request
        self._due = None
        self._starts.append(time.monotonic())
        self._process = start(
            *(request["command"], request["environment"], self._output_end, self._ignored),
            hold="restart" in request,
        )
        record(f"{self._folder}/pid", self._process)
        if len(self._starts) == 1:
            with suppress(OSError):  # the master may be gone already
                os.write(1, b"%d\n" % self._process)
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
        pending, self._pending = self._pending, []
        for number in pending + [signal.SIGTERM] * self._stopping:
            self._send(number)

    def _send(self, number: signal.Signals) -> None:
        if self._process:
            os.kill(self._process, number)
        else:
            self._pending.append(number)

    # Requests

    def _open_control(self) -> int:
        return os.open(f"{self._folder}/control", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _take_requests(self) -> None:
        try:
            letters = os.read(self._control, 64)
        except BlockingIOError:
            return
        for letter in letters:
            if letter == _HELLO:
                self._away = None
            elif letter in _TO_PROCESS:
                self._send(_TO_PROCESS[letter])
            elif letter in _TO_ALL:
                signal_all(_TO_ALL[letter])
                self._over = self._over or _TO_ALL[letter] == signal.SIGKILL
        if not letters:
            self._note_absence()

    def _note_absence(self) -> None:
        """Nobody holds CONTROL open any more: wait at a new end of it, which reports the next one."""
        again = self._open_control()
        os.dup2(again, self._control, inheritable=False)
        os.close(again)
        self._away = time.monotonic()
        if "restart" in self._request and self._request["away"]:
            self._stopping = True
            signal_all(signal.SIGCONT)  # the job may be suspended
            if self._process:
                os.kill(self._process, signal.SIGTERM)

    def _unattended_until(self) -> float | None:
        """When the keeper ends the process, unless a master comes."""
        away, limit = self._away, self._request["away"]
        return None if away is None or limit is None else away + limit

    def _patience(self) -> float | None:
        """Milliseconds until there is something to do even without an event."""
        moments = [moment for moment in (self._due, self._unattended_until()) if moment is not None]
        return None if not moments else max(0.0, min(moments) - time.monotonic()) * 1000 + 1

    # Output and ends

    def _copy_output(self) -> bool:
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return False
        self._log.write(data)
        return True

    def _reap(self) -> None:
        """Reap orphans that have ended. The process itself is not reaped before it is restarted or all ends,
        so that its id is not reused.
        """
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid != self._process:
                    os.waitpid(ended.si_pid, 0)
                    continue
                if self._over or not self._may_restart():
                    self._over = True
                    return
                self._code = os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1])
                self._process = 0

    def _may_restart(self) -> bool:
        """Whether the process is to be restarted; sets when."""
        restart = self._request.get("restart")
        if restart is None or os.path.exists(restart["unless"]):
            return False
        now = time.monotonic()
        self._starts = [start for start in self._starts if start > now - restart["window"]]
        if len(self._starts) > restart["most"]:
            self._log.write(b"[the process has ended too often, and is not restarted any more]\n")
            return False
        times = max(0, len(self._starts) - 1)
        self._due = now + min(restart["backoff"] * 2.0**times, _LONGEST_BACKOFF)
        return True

    def _finish(self) -> int:
        """Kill everything that is left; returns the exit code of the process."""
        until = time.monotonic() + _GONE_WITHIN
        with suppress(ChildProcessError):
            while time.monotonic() < until:
                ended, status = os.waitpid(-1, os.WNOHANG)
                if ended and ended == self._process:
                    self._code = os.waitstatus_to_exitcode(status)
                    self._process = 0
                if not ended:
                    signal_all(signal.SIGKILL)
                    self._copy_output()
                    time.sleep(0.002)
        while self._copy_output():
            pass
        return self._code


def record(path: str, number: int) -> None:
    """Write a number to a file, which is complete or not there."""
    with suppress(OSError):  # a full disk: the master counts the process as killed
        with open(f"{path}.new", "w") as file:
            file.write(f"{number}\n")
        os.rename(f"{path}.new", path)


def _read(descriptor: int, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = os.read(descriptor, size - len(read))
        if not piece:  # the master is gone
            raise EOFError
        read += piece
    return read


def _remove(folder: str, temporary: str | None) -> None:
    with suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
        os.rmdir(os.path.dirname(folder))  # that of all keepers, after the last one
    if temporary is not None:
        import shutil  # rarely needed, and slow to import

        shutil.rmtree(temporary, ignore_errors=True)


def main(folder: str, lock: int, temporary: str | None = None) -> None:
    """Run one process."""
    os.set_inheritable(lock, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        request = json.loads(_read(0, int(_read(0, _LENGTH), 16)))
    except EOFError:
        _remove(folder, temporary)
        sys.exit(1)
    with open(os.devnull, "rb") as nowhere:
        os.dup2(nowhere.fileno(), 0)
    # Its room is taken now: a disk that is full later does not lose the exit code.
    code = os.open(f"{folder}/exit", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(code, b" " * 16)
    keeper = Keeper(folder, request)
    os.pwrite(code, b"%16d" % keeper.run(), 0)
    if keeper.is_alone():
        _remove(folder, temporary)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
