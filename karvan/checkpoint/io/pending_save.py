"""A save in flight."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.io.throttle import Throttle

_log = logging.getLogger(__name__)

Report = Callable[[int, BaseException], None]  # is told the step of a save that has failed, and why


def log_failure(step: int, error: BaseException) -> None:
    """Say at once that a save has failed: whoever waits for it may do so much later."""
    _log.error("The checkpoint of step %d was not saved: %s", step, error)


def no_report(step: int, error: BaseException) -> None:
    """Say nothing: another rank does."""


class Pending:
    """A save that is under way on threads of its own; the program does not end before it has.

    It leaves the machine to training, and takes what it can get once somebody waits for it.
    """

    def __init__(
        self, step: int, work: Callable[[], Checkpoint], pace: Throttle, report: Report | None = None
    ) -> None:
        self.step = step
        self._report = report or log_failure
        self._pace = pace
        self._work = work
        self._ended = threading.Event()
        self._result: Checkpoint | None = None
        self._error: BaseException | None = None
        self._told = False  # somebody has seen the error
        # Not a daemon: the interpreter waits for it at its end.
        threading.Thread(target=self._run, name=f"karvan-save-{step}").start()

    @classmethod
    def failed(cls, step: int, error: BaseException) -> Pending:
        """A save that has failed before there was anything to write."""
        made = cls.__new__(cls)
        made.step = step
        made._pace = Throttle()
        made._result, made._error, made._told = None, error, False
        made._ended = threading.Event()
        made._ended.set()
        return made

    def _run(self) -> None:
        work, self._work = self._work, _nothing  # what it holds goes when it has ended
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
            self._report(self.step, error)
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

    def acknowledge(self) -> None:
        """Somebody has seen the error: `settle` does not raise it any more."""
        self._told = True

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
