"""Limits how much of the machine a save takes while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from karvan.activity import activity
from karvan.threads import cores

# The share of one core that a save may use, for each core of the machine. A step waits for the slowest of its
# threads, so a save that takes a tenth of one core costs about as much as one that takes a tenth of all.
_SHARE = 0.06


class Throttle:
    """Work in turns, each followed by a pause that leaves the cores to training.

    When somebody waits for the save, the cores have nothing else to do: `hurry` ends pauses and turns.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = min(1.0, _SHARE * cores()) if share is None else share
        self._hurried = threading.Event()
        self._turn = threading.Lock()

    def hurry(self) -> None:
        """Continue without pauses."""
        self._hurried.set()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a piece of work."""
        activity.advance()
        if self._in_a_hurry():
            yield
            return
        with self._turn:
            start = time.thread_time()
            yield
            worked = time.thread_time() - start
            if not self._in_a_hurry():
                self._hurried.wait(worked * (1 / self._share - 1))

    def _in_a_hurry(self) -> bool:
        # A program whose main thread has ended waits for the save, too.
        return self._share >= 1 or self._hurried.is_set() or not threading.main_thread().is_alive()
