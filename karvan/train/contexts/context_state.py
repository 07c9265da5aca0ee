"""The state of a TrainContext: counts, position in its data, checkpoints and tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from karvan import checkpoint as checkpoints
from karvan import distributed
from karvan.checkpoint import Checkpoint, CheckpointError, Checkpoints, Pending
from karvan.checkpoint.format.table_arrays import tables_of
from karvan.checkpoint.pending_save import Report, no_report
from karvan.data.identity import Identity
from karvan.job.checkpoint_url import local_path
from karvan.owner import Ownership
from karvan.train.assembly import TrainingSetup
from karvan.train.feed.epoch import Epoch
from karvan.train.reporting.results import ReportWindow, TrainingCounts
from karvan.train.state import dataset, train_state
from karvan.train.state.dataset import FinishedData, with_newest
from karvan.train.state.gathering import summed
from karvan.train.state.randomness import random_state, set_random_state
from karvan.train.state.saving import FailedSaves, Snapshot, is_outage, own_together
from karvan.train.state.transforms import Transforms
from karvan.train.step.optimizer_step import engines_of
from karvan.train.types import Positioned

# The saves of a TrainContext: failures of the storage are tolerated for a while.
#
# The program decides when to save, so the last save of a context is the one before it is left. If that
# failed, leaving the context repeats it, which gives the same checkpoint as long as nothing was trained
# since; otherwise leaving raises its error.
#
# From the first save into a folder until the context is left, the folder belongs to this process
# (`karvan.owner`).


class ContextSaves:
    """Saves snapshots into folders, and counts failures for each folder."""

    def __init__(self, tolerated: int, retry_seconds: float) -> None:
        FailedSaves(tolerated, retry_seconds)  # checks them
        self._settings = (tolerated, retry_seconds)
        self._runs: dict[Path, _Run] = {}
        self._owned: dict[Path, Ownership | None] = {}
        self.training = False  # whether this process takes ownership of the folders that it saves to

    def save(
        self, folder: str | os.PathLike[str] | Checkpoints, snapshot: Snapshot, *, block: bool
    ) -> Pending:
        """Save a snapshot; it is written in the background unless `block`."""
        return self._run_of(folder).save(snapshot, block=block)

    def _run_of(self, folder: str | os.PathLike[str] | Checkpoints) -> _Run:
        named = folder.folder if isinstance(folder, Checkpoints) else folder
        path = Path(os.path.abspath(local_path(named)))
        if self.training and path not in self._owned:
            self._owned[path] = own_together(path, distributed.current())
        known = self._runs.get(path)
        if known is None or (isinstance(folder, Checkpoints) and known.checkpoints is not folder):
            made = folder if isinstance(folder, Checkpoints) else Checkpoints(path)
            self._runs[path] = _Run(made, FailedSaves(*self._settings))
        return self._runs[path]

    def wait(self) -> None:
        """Wait until everything is written; raise an error that is not tolerated."""
        for run in self._runs.values():
            run.wait()

    def release(self) -> None:
        """Release the folders."""
        self.training = False
        owned, self._owned = self._owned, {}
        for one in owned.values():
            if one is not None:
                one.release()

    def finish(self, step: int) -> None:
        """Wait, and repeat a last save that failed; `step` is the current step of training."""
        for run in self._runs.values():
            run.finish(step)


class _Run:
    """The saves into one folder."""

    def __init__(self, checkpoints: Checkpoints, failures: FailedSaves) -> None:
        self.checkpoints = checkpoints
        self._failures = failures
        self._pending: Pending | None = None
        self._snapshot: Snapshot | None = None  # of the newest save, until it is complete
        self._error: BaseException | None = None  # why that failed

    def save(self, snapshot: Snapshot, *, block: bool) -> Pending:
        self.wait()
        block = block or self._failures.is_last_chance
        pending = self._begin(snapshot, self._failures.reporter(self.checkpoints.folder))
        if block or pending.done():
            self.wait()
        return pending

    def _begin(self, snapshot: Snapshot, report: Report) -> Pending:
        step, state, model, metrics = snapshot
        self._snapshot = snapshot
        try:
            pending = self.checkpoints.save(step, state, model, metrics=metrics, report=report)
        except CheckpointError as error:
            if not is_outage(error):
                raise
            if distributed.current().rank == 0:
                report(step, error)
            pending = Pending.failed(step, error)
        self._pending = pending
        return pending

    def wait(self) -> None:
        """Wait for the save in flight; a failure that is not tolerated is raised."""
        if (error := self._settle()) is not None:
            assert self._snapshot is not None
            self._failures.failed(self._snapshot.step, self.checkpoints.folder, error)

    def _settle(self) -> BaseException | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.join()
        self._error = pending.error
        if pending.error is None:
            self._failures.succeeded()
            self._snapshot = None
        pending.acknowledge()
        return pending.error

    def finish(self, step: int) -> None:
        self._settle()
        snapshot, error = self._snapshot, self._error
        if snapshot is None or error is None:
            return
        folder = self.checkpoints.folder
        if snapshot.step != step or not is_outage(error):
            raise error

        def attempt() -> BaseException | None:
            self._begin(snapshot, no_report)
            return self._settle()

        self._failures.repeat(step, folder, attempt)


class ContextState:
    """The progress of training in a custom loop; a `TrainContext` has one."""

    def __init__(self, setup: TrainingSetup, saves: ContextSaves) -> None:
        self.counts = TrainingCounts()
        self.transforms = Transforms()
        self.epoch: Epoch | None = None  # of the loader that was used last
        self._setup = setup
        self._model = setup.runs.model
        self._connection = setup.runs.connection
        self._data: Any = None  # of that loader
        self._saved: Mapping[str, Any] | None = None  # where the next loader continues
        self._loaded: Checkpoint | None = None  # the checkpoint it is from
        self._identity: Identity | None = None  # of the data of that loader
        self._data_name: str | None = None  # the name passed to `load` for it
        self._past: tuple[FinishedData, ...] = ()  # data that was trained to its end before
        self._before: FinishedData | None = None  # how the data of `_identity` was, if it is one of them
        self._data_begin = (0, 0)  # epoch and step
        self._drop_unfinished = False  # as passed to `load`
        self._saves = saves

    def begin_epoch(self, data: Iterable[Any], name: str | None) -> Epoch:
        """The epoch of the next loader of data: a new one, or the rest of one."""
        self.epoch = self._epoch_of(data, name)
        return self.epoch

    def _epoch_of(self, data: Iterable[Any], name: str | None) -> Epoch:
        self.transforms.use(data)
        self.transforms.match_loaders()
        self.transforms.require_fitted(self._model)
        same_data = data is self._data and isinstance(data, Positioned)
        if self._saved is None and same_data and self.epoch is not None:
            return self.epoch
        name, self._data_name = self._data_name if name is None else name, None
        if self._loaded is not None:
            if self._is_other(self._loaded, data, name, self._drop_unfinished):
                self._begin_data()
        elif data is not self._data:
            self._change_data(dataset.identify(data, name, self._connection))
        if self._saved is None:
            self.counts.batches = 0
        runs = self._setup.runs
        self.transforms.require_equal(self._connection.main, self._model)
        epoch = Epoch(data, self._connection, runs.placement, self._setup.passes, self.counts, runs.prefetch)
        self._data = data
        if self._saved is not None:
            epoch.load(self._saved, random_state(), self._drop_unfinished)
            self._saved = self._loaded = None
        return epoch

    def save(
        self,
        folder: str | os.PathLike[str] | Checkpoints,
        extra: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        block: bool,
    ) -> Pending:
        """Write a checkpoint of model, optimizers and the program's own state."""
        self._setup.dense.take()
        data: dict[str, Any] = {"position": None, "epoch_random": None}
        if self.epoch is not None:
            data = self.epoch.state()
        finished = self.counts.batches == 0 and (self.counts.epoch > 0 or self._identity is None)
        data["data"] = dataset.state_of(self._identity, finished, past=self._past)
        if self._saved is not None:  # nothing was trained since it was loaded
            data = {name: self._saved.get(name, data[name]) for name in data}
        own = {"metrics": {}, "window": ReportWindow().state_dict()}
        state = {
            **train_state.take_trained(self._setup, self.counts, own),
            **data,
            **self.transforms.state(),
            "scheduler": {"schedulers": []},
            "callbacks": {},
            "extra": dict(extra or {}),
        }
        return self._saves.save(folder, Snapshot(self.counts.step, state, self._model, metrics), block=block)

    def load(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        data: Iterable[Any] | None,
        data_name: str | None,
        drop_unfinished: bool,
    ) -> dict[str, Any]:
        """Restore what a checkpoint has."""
        self._saves.wait()

        def load(one: Checkpoint) -> tuple[dict[str, Any], bool]:
            is_other = data is not None and self._is_other(one, data, data_name, drop_unfinished)
            self._setup.update.forget()
            return one.load(self._model), is_other

        found, (saved, other) = checkpoints.resume_at(checkpoint, load)
        train_state.restore_trained(self._setup, self.counts, saved)
        self.transforms.load(saved)
        set_random_state(train_state.random_of(self._connection, saved))
        self._setup.dense.begin()
        self._saved, self._loaded, self._data_name = saved, found, data_name
        self._drop_unfinished = drop_unfinished
        if other:
            self._begin_data()
        return dict(saved.get("extra", {}))

    def _is_other(self, found: Checkpoint, data: Any, name: str | None, drop_unfinished: bool) -> bool:
        """Whether data is other data than a checkpoint's; see `dataset.py`. A collective."""
        self._identity = dataset.identify(data, name, self._connection)
        record = dataset.record_of(found)
        other = dataset.is_other(record, self._identity, found, drop_unfinished)
        if record is not None:
            self._past = record.history if other else record.past
            self._before = dataset.trained_before(record, self._identity) if other else None
        return other

    def _begin_data(self) -> None:
        """The next loader has new data, to which the position of the checkpoint's data does not apply."""
        dataset.begin_data(self.counts, self._before)
        self._data_begin = (self.counts.epoch, self.counts.step)
        self._saved = self._loaded = None

    def _change_data(self, identity: Identity | None) -> None:
        """The next loader has this data; data before it counts as trained if its loader has ended."""
        known, (epoch, step) = self._identity, self._data_begin
        self._identity = identity
        if known is not None and identity is not None and known.id == identity.id:
            return
        epochs = self.counts.epoch - epoch
        if known is not None and not known.grows and epochs > 0 and self.counts.batches == 0:
            newest = FinishedData(known.id, known.label, self.counts.step, epochs, self.counts.step - step)
            self._past = with_newest(self._past, newest)
        self._data_begin = (self.counts.epoch, self.counts.step)

    def sizes(self) -> dict[str, int]:
        """Count the rows of each table."""
        mine = {name: rows for engine in engines_of(self._model) for name, rows in engine.sizes().items()}
        return {name: int(rows) for name, rows in summed(self._connection.main, mine).items()}

    def clear(self, tables: str | Sequence[str] | None) -> None:
        """Remove all rows."""
        handles = tables_of(self._model)
        names = list(handles) if tables is None else [tables] if isinstance(tables, str) else list(tables)
        if unknown := [name for name in names if name not in handles]:
            raise KeyError(f"No table '{unknown[0]}' in this model; it has: {', '.join(handles)}.")
        channel = self._connection.main
        channel.barrier()  # no rank is in a step any more
        for name in names:
            handles[name].clear()
        channel.barrier()
