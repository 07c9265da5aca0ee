"""Checkpoints that could not be saved: how many failures a run tolerates.

A save fails because of the storage (a full disk, a read-only mount, a server's share that cannot be written)
or because of the program. The second kind is raised at once. The first kind is a warning, on rank 0, as soon
as it is known; existing checkpoints stay, and the next save is tried when it is due. After more than
`tolerated` failures in a row the error is raised. The last save of a run is repeated for `retry_seconds`,
then its error is raised: a run never ends successfully without its last state.

All ranks have the same count, because a save fails on all of them or on none. Rank 0 decides when time is up.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from karvan import distributed
from karvan.activity import activity
from karvan.argument_checks import check_integers
from karvan.checkpoint import CheckpointError
from karvan.checkpoint.io.pending_save import log_failure
from karvan.checkpoint.survey import folders
from karvan.job.checkpoint_url import shown

_log = logging.getLogger("karvan.train")

_FIRST_DELAY, _LONGEST_DELAY = 0.25, 10.0  # seconds between two attempts at the last save


class FailedSaves:
    """Counts saves that failed in a row, reports each of them once, and says when there were too many."""

    def __init__(self, tolerated: int = 3, retry_seconds: float = 60.0) -> None:
        check_integers(tolerate_failed_saves=tolerated)
        if tolerated < 0:
            raise ValueError(f"tolerate_failed_saves must be 0 or more, got {tolerated}.")
        if not retry_seconds >= 0:
            raise ValueError(f"save_retry_seconds must be 0 or more, got {retry_seconds}.")
        self.tolerated = tolerated
        self.retry_seconds = retry_seconds
        self.count = 0

    @property
    def is_last_chance(self) -> bool:
        """Whether one more failure is too many; the caller then waits for the save."""
        return self.count >= self.tolerated

    def reporter(self, folder: Path) -> Callable[[int, BaseException], None]:
        """A function that reports a failed save; it may be called on the thread that writes."""
        number = self.count + 1

        def report(step: int, error: BaseException) -> None:
            if not is_outage(error):
                log_failure(step, error)
                return
            if number > self.tolerated:
                return  # it is raised
            _log.warning(
                "The checkpoint of step %d was NOT saved (failure %d in a row, %d are tolerated): %s "
                "Training continues, and the next save is tried when it is due. %s",
                step,
                number,
                self.tolerated,
                _sentence(error),
                newest_text(folder),
            )

        return report

    def failed(self, step: int, folder: Path, error: BaseException) -> None:
        """A save has failed, and was reported: raise an error unless that is tolerated."""
        if not is_outage(error):
            raise error
        self.count += 1
        if self.count > self.tolerated:
            raise self.too_many(step, folder, error) from error

    def succeeded(self) -> None:
        """A checkpoint was saved."""
        self.count = 0

    def too_many(self, step: int, folder: Path, error: BaseException) -> CheckpointError:
        """The error that ends a run."""
        times = "once" if self.count == 1 else f"{self.count} times in a row"
        return CheckpointError(
            folder,
            f"checkpoints could not be saved {times} (tolerate_failed_saves is {self.tolerated}), the last "
            f"one of step {step}: {_sentence(error)} {newest_text(folder)}",
            temporary=True,
        )

    def repeat(self, step: int, folder: Path, attempt: Callable[[], BaseException | None]) -> None:
        """Attempt the last save until it succeeds; after `retry_seconds` all ranks raise its error."""
        channel = distributed.current().main
        due = time.monotonic() + self.retry_seconds
        delay, warned = _FIRST_DELAY, False
        while (error := attempt()) is not None:
            if not is_outage(error):
                raise error
            left = channel.gather_json(due - time.monotonic())[0]
            if left <= 0:
                raise CheckpointError(
                    folder,
                    f"the last checkpoint, of step {step}, could not be saved in {self.retry_seconds:g} "
                    f"seconds: {_sentence(error)} What was trained since is lost. {newest_text(folder)}",
                    temporary=True,
                ) from error
            if not warned and channel.rank == 0:
                warned = True
                _log.warning(
                    "The last checkpoint, of step %d, was NOT saved: %s It is tried again for %g seconds. %s",
                    step,
                    _sentence(error),
                    self.retry_seconds,
                    newest_text(folder),
                )
            activity.advance()  # waiting is not a stall: it is limited
            time.sleep(min(delay, left))
            delay = min(2 * delay, _LONGEST_DELAY)
        self.succeeded()


def is_outage(error: BaseException) -> bool:
    """Whether a save failed because of the storage, and not because of the program."""
    return isinstance(error, CheckpointError) and error.temporary


def newest_text(folder: Path) -> str:
    """Which checkpoint is the newest now, in a sentence."""
    try:
        found = folders(folder)
    except OSError as error:
        return f"Which checkpoint is the newest in {folder} cannot be read: {os.strerror(error.errno or 0)}."
    except CheckpointError as error:
        return f"Which checkpoint is the newest cannot be read: {error}"
    if not found:
        return f"There is no checkpoint in {shown(folder)} yet."
    return f"The newest checkpoint is {shown(found[-1])}."


def _sentence(error: BaseException) -> str:
    text = str(error).strip()
    return text if text.endswith(".") else f"{text}."
