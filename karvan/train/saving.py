"""When checkpoints are saved, and how failures are handled."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn
from typing_extensions import override

from karvan.activity import activity
from karvan.argument_checks import check_integers
from karvan.checkpoint import Checkpoint, CheckpointError, Checkpoints, Pending
from karvan.checkpoint.files import lease_object
from karvan.checkpoint.recovery import check_resume
from karvan.checkpoint.survey import folders
from karvan.checkpoint.table_files import tables_of
from karvan.checkpoint.writer import Report, log_failure, no_report
from karvan.distributed import Connection
from karvan.job.checkpoint_url import shown
from karvan.job.environment import JobEnvironment
from karvan.owner import OwnerError, Ownership, own

# The folder that a fit saves to belongs to it; with several ranks, rank 0 owns it for all.


@contextmanager
def owned_folder(folder: Path | None, connection: Connection, group: str = "") -> Iterator[None]:
    """Own the folder of checkpoints, if there is one, while inside, on all ranks or on none.

    All ranks raise an OwnerError if another run owns it. group: the name of a group of which one trainer
    after the other may own the folder.
    """
    owned: Ownership | None = None
    refused: str | None = None
    if folder is not None and connection.rank == 0:
        try:
            owned = own(folder, group, lease_object(folder))
        except OwnerError as error:
            if connection.world_size == 1:
                raise
            refused = str(error)
    if folder is not None and connection.world_size > 1:
        refused = connection.main.gather_json(refused)[0]
        if refused is not None:
            raise OwnerError(refused)
    try:
        yield
    finally:
        if owned is not None:
            owned.release()


# Checkpoints that could not be saved: how many failures a run tolerates.
#
# A save fails because of the storage (a full disk, a read-only mount, a server's share that cannot be
# written) or because of the program. The second kind is raised at once. The first kind is a warning, on rank
# 0, as soon as it is known; existing checkpoints stay, and the next save is tried when it is due. After more
# than `tolerated` failures in a row the error is raised. The last save of a run is repeated for
# `retry_seconds`, then its error is raised: a run never ends successfully without its last state.
#
# All ranks have the same count, because a save fails on all of them or on none. Rank 0 decides when time is
# up.


_log = logging.getLogger("karvan.train")

_FIRST_DELAY, _LONGEST_DELAY = 0.25, 10.0  # seconds between two attempts at the last save


class FolderSaves:
    """Saves into one folder, one after the other, and counts those that failed in a row."""

    def __init__(self, checkpoints: Checkpoints, settings: SaveSettings, connection: Connection) -> None:
        self.checkpoints = checkpoints
        self.newest: Snapshot | None = None  # what was saved last
        self.error: BaseException | None = None  # why that failed, once it was waited for
        self._settings = settings
        self._connection = connection
        self._pending: Pending | None = None  # in flight, or ended and not checked yet
        self._failures = 0

    def forget(self) -> None:
        """Start without failures; a save that is still in flight ends before."""
        self.settle()
        self._failures, self.error = 0, None

    def save(self, snapshot: Snapshot, *, block: bool = False) -> Pending:
        """Write a snapshot in the background, or at once with `block`, or if one more failure is too many.

        A failure of the save before, or of this one, is raised unless it is tolerated.
        """
        self.wait()
        block = block or self._failures >= self._settings.tolerate
        pending, begins = self._begin(snapshot, self._reporter())
        if block or not begins:
            self.wait()
        return pending

    def _begin(self, snapshot: Snapshot, report: Report) -> tuple[Pending, bool]:
        """Start a save; whether it has begun, or has failed already, which was reported."""
        step, state, model, metrics = self.newest = snapshot
        try:
            pending, begins = self.checkpoints.save(step, state, model, metrics=metrics, report=report), True
        except CheckpointError as error:
            if self._connection.rank == 0:
                report(step, error)
            pending, begins = Pending.failed(step, error), False
        self._pending = pending
        return pending, begins

    def _reporter(self) -> Report:
        """What reports a failed save; it may be called on the thread that writes."""
        number, tolerated = self._failures + 1, self._settings.tolerate

        def report(step: int, error: BaseException) -> None:
            if not is_outage(error):
                log_failure(step, error)
            elif number <= tolerated:  # otherwise it is raised
                _log.warning(
                    "The checkpoint of step %d was NOT saved (failure %d in a row, %d are tolerated): %s "
                    "Training continues, and the next save is tried when it is due. %s",
                    step,
                    number,
                    tolerated,
                    _sentence(error),
                    newest_text(self.checkpoints.folder),
                )

        return report

    def settle(self) -> BaseException | None:
        """Wait for the save in flight; returns why it failed, which was reported."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.join()
        self.error = pending.error
        if pending.error is None:
            self._failures = 0
        pending.acknowledge()
        return pending.error

    def wait(self) -> None:
        """Wait for the save in flight; a failure is raised unless it is tolerated."""
        error = self.settle()
        if error is None:
            return
        if not is_outage(error):
            raise error
        self._failures += 1
        if self._failures > self._settings.tolerate:
            assert self.newest is not None
            folder, tolerated = self.checkpoints.folder, self._settings.tolerate
            times = "once" if self._failures == 1 else f"{self._failures} times in a row"
            raise CheckpointError(
                folder,
                f"checkpoints could not be saved {times} (tolerate_failed_saves is {tolerated}), the last "
                f"one of step {self.newest.step}: {_sentence(error)} {newest_text(folder)}",
                temporary=True,
            ) from error

    def repeat(self, snapshot: Snapshot) -> None:
        """Save the last snapshot until that succeeds; after `retry_seconds` all ranks raise its error."""
        folder, seconds = self.checkpoints.folder, self._settings.retry_seconds
        due = time.monotonic() + seconds
        delay, warned = _FIRST_DELAY, False
        while True:
            self._begin(snapshot, no_report)
            if (error := self.settle()) is None:
                return
            if not is_outage(error):
                raise error
            remaining = self._connection.main.gather_json(due - time.monotonic())[0]
            if remaining <= 0:
                raise CheckpointError(
                    folder,
                    f"the last checkpoint, of step {snapshot.step}, could not be saved in {seconds:g} "
                    f"seconds: {_sentence(error)} What was trained since is lost. {newest_text(folder)}",
                    temporary=True,
                ) from error
            if not warned and self._connection.rank == 0:
                warned = True
                _log.warning(
                    "The last checkpoint, of step %d, was NOT saved: %s It is tried again for %g seconds. %s",
                    snapshot.step,
                    _sentence(error),
                    seconds,
                    newest_text(folder),
                )
            activity.advance()  # waiting is not a stall: it is limited
            time.sleep(min(delay, remaining))
            delay = min(2 * delay, _LONGEST_DELAY)


def is_outage(error: BaseException) -> bool:
    """Whether a save failed because of the storage, and not because of the program."""
    return isinstance(error, CheckpointError) and error.temporary


def newest_text(folder: Path) -> str:
    """Which checkpoint is the newest now, in a sentence."""
    try:
        step_folders = folders(folder)
    except OSError as error:
        return f"Which checkpoint is the newest in {folder} cannot be read: {os.strerror(error.errno or 0)}."
    except CheckpointError as error:
        return f"Which checkpoint is the newest cannot be read: {error}"
    if not step_folders:
        return f"There is no checkpoint in {shown(folder)} yet."
    return f"The newest checkpoint is {shown(step_folders[-1])}."


def _sentence(error: BaseException) -> str:
    text = str(error).strip()
    return text if text.endswith(".") else f"{text}."


class Snapshot(NamedTuple):
    """The content of a checkpoint."""

    step: int
    state: Mapping[str, Any]
    model: nn.Module
    metrics: Mapping[str, float] | None


T = TypeVar("T")


@dataclass(frozen=True)
class SaveSettings:
    """Save every so many steps, every so many seconds, or both; None for neither. The end is always saved.

    tolerate, retry_seconds: see `FolderSaves`.
    """

    every: int | None = None
    seconds: float | None = 600.0
    tolerate: int = 3
    retry_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_integers(checkpoint_every=self.every)
        if self.every is not None and self.every < 1:
            raise ValueError(f"checkpoint_every must be at least 1 or None, got {self.every}.")
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"checkpoint_seconds must be above 0 or None, got {self.seconds}.")
        check_integers(tolerate_failed_saves=self.tolerate)
        if self.tolerate < 0:
            raise ValueError(f"tolerate_failed_saves must be 0 or more, got {self.tolerate}.")
        if not self.retry_seconds >= 0:
            raise ValueError(f"save_retry_seconds must be 0 or more, got {self.retry_seconds}.")


class NoSaver:
    """Saves nothing; `Saver` derives from it."""

    folder: Path | None = None
    best_metric: str | None = None  # by which the best checkpoint is selected

    @property
    def keeps_best(self) -> bool:
        """Whether the best checkpoint is retained as well."""
        return self.best_metric is not None

    def require_writable(self) -> None:
        """Raise a CheckpointError if nothing can be saved; on all ranks, if one cannot."""

    def begin(self) -> None:
        """A fit starts."""

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, if there is one."""
        return None

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, intact or damaged; None if there is none."""
        return None

    def resume(self, load: Callable[[Checkpoint], T], name: str | None = None) -> tuple[Checkpoint, T] | None:
        """The newest intact checkpoint, or the one of a name, and the result of `load`; None if there is
        none. See `karvan/checkpoint/recovery.py`."""
        return None

    def load(self, checkpoint: Checkpoint, model: nn.Module) -> dict[str, Any]:
        """Fill the model's tables from a checkpoint, and return its state."""
        return checkpoint.load(model)

    def due_by_steps(self, step: int) -> bool:
        """Whether it is time to save by the number of steps, which all ranks know."""
        return False

    def due_by_time(self) -> bool:
        """Whether it is time to save by the clock."""
        return False

    def take_time(self) -> bool:
        """Whether it is time to save by the clock; the caller will save, so the interval starts again."""
        return False

    def save(self, snapshot: Snapshot) -> None:
        """Capture the current state, and write it in the background."""

    def wait(self) -> None:
        """Wait until everything is written; a failure of the save in flight is only reported."""

    def finish(self, unsaved: bool, take: Callable[[], Snapshot]) -> str | None:
        """Wait until everything is written; returns the path of the newest checkpoint.

        take: gives the current snapshot; used if the state is `unsaved`, or if the save in flight fails.
        """
        if unsaved:
            self.save(take())
        return None


class Saver(NoSaver):
    """Saves to a folder of checkpoints."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: SaveSettings,
        connection: Connection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints = checkpoints
        self._settings = settings
        self._saves = FolderSaves(checkpoints, settings, connection)
        self._connection = connection
        self._clock = clock
        self._last = clock()
        self._model: nn.Module | None = None  # of which this fit has saved a checkpoint
        self._written: tuple[Any, ...] | None = None  # the last checkpoint of a fit, and its tables' versions
        self.folder = checkpoints.folder
        self.best_metric = None if checkpoints.keep_best is None else checkpoints.keep_best[0]

    @override
    def begin(self) -> None:
        self._last = self._clock()
        self._model = self._written = None
        self._saves.forget()  # those of a fit that an error has ended

    @override
    def require_writable(self) -> None:
        self._checkpoints.require_writable()

    @override
    def latest(self) -> Checkpoint | None:
        return self._checkpoints.latest()

    @override
    def newest_step(self) -> int | None:
        return self._checkpoints.newest_step()

    @override
    def resume(self, load: Callable[[Checkpoint], T], name: str | None = None) -> tuple[Checkpoint, T] | None:
        return self._checkpoints.resume_with(load, name)

    @override
    def load(self, checkpoint: Checkpoint, model: nn.Module) -> dict[str, Any]:
        """Tables unchanged since this process saved them stay, for later deltas."""
        written = self._written is not None and self._written == _seen(checkpoint, model)
        if all(self._connection.main.gather_json(written)):
            return checkpoint.state()
        return checkpoint.load(model)

    @override
    def due_by_steps(self, step: int) -> bool:
        return self._settings.every is not None and step % self._settings.every == 0

    @override
    def take_time(self) -> bool:
        due = self.due_by_time()
        if due:
            self._last = self._clock()
        return due

    @override
    def due_by_time(self) -> bool:
        seconds = self._settings.seconds
        return seconds is not None and self._clock() >= self._last + seconds

    @override
    def save(self, snapshot: Snapshot) -> None:
        """A failure of the save before, or of this one, may be tolerated."""
        self._last = self._clock()
        self._saves.save(snapshot)
        self._model = snapshot.model

    @override
    def wait(self) -> None:
        self._saves.settle()

    @override
    def finish(self, unsaved: bool, take: Callable[[], Snapshot]) -> str | None:
        """The last save is repeated for a while if it fails."""
        self._saves.settle()
        error = self._saves.error
        if error is not None and not is_outage(error):
            raise error
        if unsaved or error is not None:
            snapshot = take()
            self._saves.repeat(snapshot)
            self._model = snapshot.model
        latest = self.latest()
        if latest is not None and self._model is not None:
            self._written = _seen(latest, self._model)
        return None if latest is None else shown(latest.path)


def _seen(checkpoint: Checkpoint, model: nn.Module) -> tuple[Any, ...]:
    """Differs if tables have been trained or changed since a checkpoint."""
    return checkpoint.manifest.id, {name: table.version for name, table in tables_of(model).items()}


def make_saver(
    checkpoints: Checkpoints | str | os.PathLike[str] | None, settings: SaveSettings, connection: Connection
) -> NoSaver:
    """A saver for checkpoints or for the path of their folder; one that does nothing for None."""
    if checkpoints is None:
        return NoSaver()
    converted = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
    return Saver(converted, settings, connection)


# Which checkpoint a fit continues from: `resume` of `Trainer.fit`.
#
# A name is a choice for the start of a job. Trainers that a launcher or torchrun has restarted continue from
# the newest checkpoint instead: going back to the chosen one with every restart would lose what was trained
# since.


def check_choice(saver: NoSaver, resume: bool | str) -> None:
    """Raise if checkpoints are refused but exist, or if one is requested but there is no folder."""
    check_resume(resume)
    if isinstance(resume, str) and saver.folder is None:
        raise ValueError(f"resume expects a Trainer with checkpoints, got {resume!r} and a Trainer without.")
    newest = None if resume else saver.newest_step()
    if newest is not None:
        raise ValueError(
            f"resume is False, but {shown(saver.folder)} has checkpoints up to step {newest}: "
            "expected a folder without, or resume=True."
        )


def chosen(resume: bool | str) -> str | None:
    """The name of the checkpoint to use; None for the newest."""
    by_torchrun = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") not in ("", "0")
    restarted = by_torchrun or JobEnvironment.read().generation > 0
    return resume if isinstance(resume, str) and not restarted else None
