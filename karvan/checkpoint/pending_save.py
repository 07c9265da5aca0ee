"""A save in flight."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.format.safetensors_file import Throttle

_log = logging.getLogger(__name__)

WRITERS = 3  # threads of a process that write files, unless the user says how many
MOST_WRITERS = 256


def check_writers(what: str, writers: int) -> None:
    """Raise unless so many threads can write."""
    if not 1 <= writers <= MOST_WRITERS:
        raise ValueError(f"{what} expects writers from 1 to {MOST_WRITERS}, got {writers}.")


Report = Callable[[int, BaseException], None]  # called with the step of a save that has failed, and its error


def log_failure(step: int, error: BaseException) -> None:
    """Report at once that a save has failed: the program may wait for it only much later."""
    _log.error("The checkpoint of step %d was not saved: %s", step, error)


def no_report(step: int, error: BaseException) -> None:
    """Report nothing: another rank does."""


class Pending:
    """A save in flight on its own threads.

    The program does not end before it has ended.

    It uses little of the machine while training continues, and all it can get once somebody waits for it.

    Args:
        step: The step of the checkpoint.
        work: What writes it.
        pace: What slows it down.
        report: Called with the step and the error if it fails; by default the error is logged.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> pending = kv.checkpoint.start("seventeen", {}, engine)
        >>> checkpoint = pending.wait()
        >>> pending.done(), pending.error
        (True, None)
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
        self._error_raised = False  # or acknowledged
        # Not a daemon: the interpreter waits for it at its end.
        threading.Thread(target=self._run, name=f"karvan-save-{step}").start()

    @classmethod
    def failed(cls, step: int, error: BaseException) -> Pending:
        """Make a save that has failed before writing started.

        Args:
            step: The step of the checkpoint.
            error: Why it failed.

        Returns:
            The save.
        """
        save = cls.__new__(cls)
        save.step = step
        save._pace = Throttle()
        save._result, save._error, save._error_raised = None, error, False
        save._ended = threading.Event()
        save._ended.set()
        return save

    def _run(self) -> None:
        work, self._work = self._work, _nothing  # releases what it holds when it has ended
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
            self._report(self.step, error)
        finally:
            del work
            self._ended.set()

    def done(self) -> bool:
        """Check whether it has ended, successfully or not.

        Returns:
            Whether it has.
        """
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is in flight, and if it succeeded."""
        return self._error

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is complete.

        Args:
            timeout: How many seconds to wait; None for no limit.

        Returns:
            The checkpoint.

        Raises:
            TimeoutError: It is not complete yet.
            CheckpointError: The save has failed.
        """
        self._pace.hurry()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The checkpoint of step {self.step} is not complete after {timeout} seconds.")
        if self._error is not None:
            self._error_raised = True
            raise self._error
        assert self._result is not None
        return self._result

    def join(self) -> None:
        """Wait until it has ended, successfully or not."""
        self._pace.hurry()
        self._ended.wait()

    def acknowledge(self) -> None:
        """Say that the error has been handled: `settle` does not raise it any more."""
        self._error_raised = True

    def settle(self) -> None:
        """Wait until it has ended.

        Raises:
            CheckpointError: The save has failed, and the error was not raised before.
        """
        self.join()
        if self._error is not None and not self._error_raised:
            self.wait()


def _nothing() -> Checkpoint:
    raise AssertionError("a save runs once")


class Writers:
    """Threads that write files while the next ones are prepared; few files wait, so memory is bounded.

    All start at once: an interpreter that is about to end does not start threads any more.
    """

    def __init__(self, count: int = WRITERS) -> None:
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
        """Queue a job; raises the exception of an earlier one."""
        if self._error is not None:
            raise self._error
        self._jobs.put(job)

    def end(self) -> None:
        """Wait for all jobs and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def finish(self) -> None:
        """End, and raise the exception of a failed job."""
        self.end()
        if self._error is not None:
            raise self._error
