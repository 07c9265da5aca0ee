"""A clock that stops while its process cannot run.

A process that monitors others compares times: a heartbeat is too old, an answer is overdue. If it was paused
itself (SIGSTOP, Ctrl-Z, a laptop that slept, a virtual machine that was moved), it received nothing meanwhile
and must not blame the others for that. So heartbeats, silence and deadlines are measured by `clock.now()`,
not by `time.monotonic()`.

A thread reads the clock four times a second. If the next reading, by any thread, comes seconds late, the
process was paused: that time is not counted, and `woke` is the time at which the pause ended. Monitors count
silence from `woke` at the earliest. A native call that holds the interpreter for as long has the same effect,
on purpose.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_TICK = 0.25  # seconds between two readings
_PAUSE = 2.0  # more seconds than this between two readings: the process was paused

# CLOCK_MONOTONIC stands still while the machine sleeps, which would then go unnoticed.
_SOURCE = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ProcessClock:
    """Seconds in which the process could run."""

    def __init__(
        self,
        source: Callable[[], float] = lambda: time.clock_gettime(_SOURCE),
        *,
        tick: float = _TICK,
        pause: float = _PAUSE,
    ) -> None:
        self._source = source
        self._tick = tick
        self._pause = pause
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._ticking = False
        self._last = self._source()
        self.paused = 0.0  # seconds so far
        self.woke = float("-inf")  # when the last pause ended

    def now(self) -> float:
        """Seconds since an arbitrary moment, without pauses."""
        if not self._ticking:
            self._start()
        with self._lock:
            read = self._source()
            if read - self._last > self._pause:
                self.paused += read - self._last - self._tick
                self.woke = read - self.paused
            self._last = read
            return read - self.paused

    def silence(self, since: float) -> float:
        """Seconds since a moment or, if that is later, since the last pause ended."""
        now = self.now()
        return now - max(since, self.woke)

    def sleep(self, seconds: float) -> None:
        """Wait for this many seconds in which the process can run."""
        until = self.now() + seconds
        while (remaining := until - self.now()) > 0:
            time.sleep(remaining)

    def _start(self) -> None:
        with self._lock:
            if self._ticking:
                return
            self._ticking = True
            self._last = self._source()  # the last reading may be old
        try:
            threading.Thread(target=self._run, name="karvan-clock", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down: there are no regular readings any more
            self._pause = float("inf")

    def _run(self) -> None:
        while True:
            time.sleep(self._tick)
            self.now()


clock = ProcessClock()
os.register_at_fork(after_in_child=clock._reset)  # a forked child has none of the threads
