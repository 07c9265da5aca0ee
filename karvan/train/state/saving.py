"""When checkpoints are saved, and how failures are handled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import nn
from typing_extensions import override

from karvan import distributed
from karvan.argument_checks import check_integers
from karvan.checkpoint import Checkpoint, CheckpointError, Checkpoints, Pending
from karvan.checkpoint.format.table_arrays import tables_of
from karvan.checkpoint.io.pending_save import Report, no_report
from karvan.job.checkpoint_url import shown
from karvan.train.state.failed_saves import FailedSaves, is_outage

_Failed: TypeAlias = tuple[int, Path, BaseException]  # the step of a save, where to, why


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

    tolerate, retry_seconds: see `failed_saves.py`.
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
        FailedSaves(self.tolerate, self.retry_seconds)  # checks them


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

    def due(self, step: int) -> bool:
        """Whether it is time to save."""
        return False

    def due_by_steps(self, step: int) -> bool:
        """Whether it is time to save by the number of steps, which all ranks know."""
        return False

    def due_by_time(self) -> bool:
        """Whether it is time to save by the clock."""
        return False

    def take_time(self) -> bool:
        """Whether it is time to save by the clock; the caller will save, so the interval starts again."""
        return False

    def save(
        self, step: int, state: Mapping[str, Any], model: nn.Module, metrics: Mapping[str, float] | None
    ) -> None:
        """Capture the current state, and write it in the background."""

    def wait(self) -> None:
        """Wait until everything is written; a failure of the save in flight is only reported."""

    def finish(self, unsaved: bool, take: Callable[[], Snapshot]) -> str | None:
        """Wait until everything is written; returns the path of the newest checkpoint.

        take: gives the current snapshot; used if the state is `unsaved`, or if the save in flight fails.
        """
        if unsaved:
            self.save(*take())
        return None


class Saver(NoSaver):
    """Saves to a folder of checkpoints."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: SaveSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints = checkpoints
        self._settings = settings
        self._failures = FailedSaves(settings.tolerate, settings.retry_seconds)
        self._pending: Pending | None = None  # in flight, or ended and not checked yet
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
        self._settle()  # of a fit that an error has ended
        self._failures.succeeded()

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
        if all(distributed.current().main.gather_json(written)):
            return checkpoint.state()
        return checkpoint.load(model)

    @override
    def due(self, step: int) -> bool:
        return self.due_by_steps(step) or self.due_by_time()

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
    def save(
        self, step: int, state: Mapping[str, Any], model: nn.Module, metrics: Mapping[str, float] | None
    ) -> None:
        """A failure of the save before, or of this one, may be tolerated."""
        self._last = self._clock()
        failed = self._settle()
        if failed is not None:
            self._failures.failed(*failed)
        last_chance = self._failures.is_last_chance
        report = self._failures.reporter(self._checkpoints.folder)
        failed = self._begin(Snapshot(step, state, model, metrics), report)
        if failed is None and last_chance:
            failed = self._settle()
        if failed is not None:
            self._failures.failed(*failed)

    def _begin(self, snapshot: Snapshot, report: Report) -> _Failed | None:
        """Start a save; returns a failure, which was reported."""
        step, state, model, metrics = snapshot
        try:
            self._pending = self._checkpoints.save(step, state, model, metrics=metrics, report=report)
        except CheckpointError as error:
            if distributed.current().rank == 0:
                report(step, error)
            return step, self._checkpoints.folder, error
        self._model = model
        return None

    def _settle(self) -> _Failed | None:
        """Wait for the save in flight; returns its failure, which was reported."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.join()
        if pending.error is None:
            self._failures.succeeded()
            return None
        pending.acknowledge()
        return pending.step, self._checkpoints.folder, pending.error

    @override
    def wait(self) -> None:
        self._settle()

    @override
    def finish(self, unsaved: bool, take: Callable[[], Snapshot]) -> str | None:
        """The last save is repeated for a while if it fails."""
        failed = self._settle()
        if failed is not None and not is_outage(failed[2]):
            raise failed[2]
        if unsaved or failed is not None:
            snapshot = take()

            def attempt() -> BaseException | None:
                failed = self._begin(snapshot, no_report) or self._settle()
                return None if failed is None else failed[2]

            self._failures.repeat(snapshot.step, self._checkpoints.folder, attempt)
        latest = self.latest()
        if latest is not None and self._model is not None:
            self._written = _seen(latest, self._model)
        return None if latest is None else shown(latest.path)


def _seen(checkpoint: Checkpoint, model: nn.Module) -> tuple[Any, ...]:
    """Differs if tables have been trained or changed since a checkpoint."""
    return checkpoint.manifest.id, {name: table.version for name, table in tables_of(model).items()}


def make_saver(checkpoints: Checkpoints | str | os.PathLike[str] | None, settings: SaveSettings) -> NoSaver:
    """A saver for checkpoints or for the path of their folder; one that does nothing for None."""
    if checkpoints is None:
        return NoSaver()
    made = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
    return Saver(made, settings)
