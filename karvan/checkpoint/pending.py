"""A save that is under way."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from karvan.checkpoint.pace import Pace

if TYPE_CHECKING:
    from karvan.checkpoint.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


class Pending:
    """A save that is under way on threads of its own; the program does not end before it has.

    It leaves the machine to training, and takes what it can get once somebody waits for it.
    """

    def __init__(self, step: int, work: Callable[[], Checkpoint], pace: Pace) -> None:
        self.step = step
        self._pace = pace
        self._work = work
        self._ended = threading.Event()
        self._result: Checkpoint | None = None
        self._error: BaseException | None = None
        self._told = False  # somebody has seen the error
        # Not a daemon: the interpreter waits for it at its end.
        threading.Thread(target=self._run, name=f"karvan-save-{step}").start()

    def _run(self) -> None:
        work, self._work = self._work, _nothing  # what it holds goes when it has ended
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
            _log.error("The checkpoint of step %d was not saved: %s", self.step, error)
        finally:
            del work
            self._ended.set()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is under way and when it did not."""
        return self._error

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """The checkpoint, once it is complete; raises what went wrong."""
        self._pace.hurry()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The checkpoint of step {self.step} is not complete after {timeout} seconds.")
        if self._error is not None:
            self._told = True
            raise self._error
        assert self._result is not None
        return self._result

    def join(self) -> None:
        """Wait until it has ended, well or not."""
        self._pace.hurry()
        self._ended.wait()

    def settle(self) -> None:
        """Wait; raise what went wrong unless it has been raised before."""
        self.join()
        if self._error is not None and not self._told:
            self.wait()


def _nothing() -> Checkpoint:
    raise AssertionError("a save runs once")


class Writers:
    """Threads that write files while the next ones are made; few files wait, so that memory stays bounded.

    All start at once: an interpreter that is about to end starts no threads any more.
    """

    def __init__(self, count: int = 3) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, name="karvan-write") for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = error
            del job

    def put(self, job: Callable[[], None]) -> None:
        """Have it done; raises what an earlier one raised."""
        if self._error is not None:
            raise self._error
        self._jobs.put(job)

    def end(self) -> None:
        """Wait for all jobs and let the threads go."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def finish(self) -> None:
        """End, and raise what a job raised."""
        self.end()
        if self._error is not None:
            raise self._error
