"""The state of a TrainContext: counts, position in its data, checkpoints and tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from karvan import checkpoint as checkpoints
from karvan.checkpoint import Checkpoint, Checkpoints, Pending
from karvan.checkpoint.format.table_arrays import tables_of
from karvan.data.identity import Identity
from karvan.train.assembly import TrainingSetup
from karvan.train.contexts.context_saves import ContextSaves
from karvan.train.feed.epoch import Epoch
from karvan.train.reporting.results import ReportWindow, TrainingCounts
from karvan.train.state import dataset, train_state
from karvan.train.state.finished_data import FinishedData, with_newest
from karvan.train.state.gathering import summed
from karvan.train.state.randomness import random_state, set_random_state
from karvan.train.state.saving import Snapshot
from karvan.train.state.transforms import Transforms
from karvan.train.step.optimizer_step import engines_of
from karvan.train.types import Positioned


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
