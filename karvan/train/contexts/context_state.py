"""What a TrainContext keeps: counts, checkpoints of its state, and its tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from karvan import checkpoint as checkpoints
from karvan.checkpoint import Checkpoint, Checkpoints, Pending
from karvan.checkpoint.format.table_arrays import tables_of
from karvan.data.identity import Identity
from karvan.dense.local import LocalDense
from karvan.distributed import Connection
from karvan.train.contexts.context_saves import ContextSaves
from karvan.train.feed.epoch import Epoch
from karvan.train.reporting.results import ReportWindow, TrainingCounts
from karvan.train.state import dataset, train_state
from karvan.train.state.finished_data import FinishedData, with_newest
from karvan.train.state.gathering import summed
from karvan.train.state.randomness import set_random_state
from karvan.train.state.saving import Snapshot
from karvan.train.state.transforms import Transforms
from karvan.train.step.optimizer_step import OptimizerStep, engines_of
from karvan.train.step.precision import Precision


class ContextState:
    """The state of training in a hand-written loop; `TrainContext` derives from it."""

    def __init__(
        self,
        model: nn.Module,
        connection: Connection,
        precision: Precision,
        update: OptimizerStep,
        dense: LocalDense,
        transforms: Transforms,
        saves: ContextSaves,
    ) -> None:
        self.model = model
        self.connection = connection
        self.precision = precision
        self.update = update
        self.dense = dense
        self.transforms = transforms
        self.counts = TrainingCounts()
        self._course: Epoch | None = None  # of the loader that was used last
        self._saved: Mapping[str, Any] | None = None  # where the next loader is to go on
        self._loaded: Checkpoint | None = None  # what that is of
        self._identity: Identity | None = None  # of the data of that loader
        self._data_name: str | None = None  # that `load` was given for it
        self._past: tuple[FinishedData, ...] = ()  # data that was trained to its end before
        self._before: FinishedData | None = None  # how that of `_identity` was, if it is one of them
        self._data_begin = (0, 0)  # epoch and step
        self._drop_unfinished = False  # as `load` was told
        self._saves = saves

    @property
    def dense_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the model's parameters."""
        return self.update.optimizers.get("dense")

    @property
    def sparse_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the rows."""
        return self.update.optimizers.get("sparse")

    @property
    def step(self) -> int:
        """Optimizer steps so far, those that were left out included."""
        return self.counts.step

    @property
    def skipped(self) -> int:
        """Steps that were left out, because a gradient was not finite."""
        return self.counts.skipped

    @property
    def epoch(self) -> int:
        """How often a loader has come to the end of its data."""
        return self.counts.epoch

    def _in_step(self) -> bool:
        """Whether some of a step has been done and some has not."""
        return False

    def _in_loop(self) -> bool:
        """Whether a loader is being iterated."""
        return False

    def save(
        self,
        folder: str | os.PathLike[str] | Checkpoints,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = True,
    ) -> Pending:
        """Save a checkpoint into a run's folder, as a Trainer does, to go on from with `load`.

        It has the model, its tables, optimizers, scaler, counts, random generators, the statistics of
        transforms, and the position of the loader used last. extra is a tree of one's own, such as a
        scheduler's state_dict. Unless wait, it is written while training goes on; leaving the context waits.
        All ranks save together, between two steps. A save that the disk or the servers refuse is a warning,
        and `error` of the result says why; see `tolerate_failed_saves`.
        """
        if self._in_step():
            raise RuntimeError("save was called in the middle of a step: expected it behind its backward.")
        self.dense.take()
        course = self._course
        data: dict[str, Any] = {"position": None, "epoch_random": None}
        if course is not None:
            data = course.state()
        finished = self.counts.batches == 0 and (self.counts.epoch > 0 or self._identity is None)
        data["data"] = dataset.state_of(self._identity, finished, past=self._past)
        if self._saved is not None:  # nothing was trained since it was loaded
            data = {name: self._saved.get(name, data[name]) for name in data}
        whole = {
            **train_state.take_trained(self, {"metrics": {}, "window": ReportWindow().state_dict()}),
            **data,
            **self.transforms.state(),
            "scheduler": {"schedulers": []},
            "callbacks": {},
            "extra": dict(extra or {}),
        }
        return self._saves.save(folder, Snapshot(self.step, whole, self.model, metrics), wait=wait)

    def load(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        data: Iterable[Any] | None = None,
        data_name: str | None = None,
        drop_unfinished: bool = False,
    ) -> dict[str, Any]:
        """Go back to a checkpoint, or to a run's newest, of a TrainContext or a Trainer; gives its `extra`.

        Of a run's folder the newest whole one is taken: a damaged one is a warning, and is renamed to
        damaged-step-…. A damaged checkpoint that was named is an error.
        The next loader goes on behind the last batch that was trained. What a Trainer has of schedulers,
        metrics and callbacks is left out. All ranks load together.

        data: what is trained on next, with its name if it has one. If it is other data than the checkpoint's,
        `epoch` is 0 and its first loader begins at its start; `step` continues. If the run has trained it to
        its end before, `epoch` is the number of its epochs, and there is a warning. Other data that was not
        trained to its end is an error, unless drop_unfinished; so is an epoch that another kind of data, as
        `kv.data.from_loaders()`, has begun, which drop_unfinished starts again.
        """
        if self._in_loop() or self._in_step():
            raise RuntimeError(
                "load was called inside of a loop over a loader: expected it before or behind."
            )
        self._saves.wait()

        def load(one: Checkpoint) -> tuple[dict[str, Any], bool]:
            is_other = data is not None and self._is_other(one, data, data_name, drop_unfinished)
            self.update.forget()
            return one.load(self.model), is_other

        found, (saved, other) = checkpoints.resume_at(checkpoint, load)
        train_state.restore_trained(self, saved)
        self.transforms.load(saved)
        set_random_state(train_state.random_of(self.connection, saved))
        self.dense.begin()
        self._saved, self._loaded, self._data_name = saved, found, data_name
        self._drop_unfinished = drop_unfinished
        if other:
            self._begin_data()
        return dict(saved.get("extra", {}))

    def _is_other(self, found: Checkpoint, data: Any, name: str | None, drop_unfinished: bool) -> bool:
        """Whether data is other data than a checkpoint's; see `dataset.py`. A collective."""
        self._identity = dataset.identify(data, name, self.connection)
        record = dataset.record_of(found)
        other = dataset.is_other(record, self._identity, found, drop_unfinished)
        if record is not None:
            self._past = record.history if other else record.past
            self._before = dataset.trained_before(record, self._identity) if other else None
        return other

    def _begin_data(self) -> None:
        """The next loader has new data: the position of the checkpoint's data is of no use."""
        dataset.begin_data(self.counts, self._before)
        self._data_begin = (self.counts.epoch, self.counts.step)
        self._saved = self._loaded = None

    def _change_data(self, identity: Identity | None) -> None:
        """The next loader has this data; the data before counts as trained if its loader came to its end."""
        known, (epoch, step) = self._identity, self._data_begin
        self._identity = identity
        if known is not None and identity is not None and known.id == identity.id:
            return
        epochs = self.counts.epoch - epoch
        if known is not None and not known.grows and epochs > 0 and self.counts.batches == 0:
            newest = FinishedData(known.id, known.label, self.step, epochs, self.step - step)
            self._past = with_newest(self._past, newest)
        self._data_begin = (self.counts.epoch, self.step)

    def sizes(self) -> dict[str, int]:
        """How many rows each table has, over all ranks or servers together; a collective."""
        mine = {name: rows for engine in engines_of(self.model) for name, rows in engine.sizes().items()}
        return {name: int(rows) for name, rows in summed(self.connection.main, mine).items()}

    def clear(self, tables: str | Sequence[str] | None = None) -> None:
        """Remove all rows of these tables, or of all; a collective.

        What optimizers count for a table goes on; gradients of rows that have gone are dropped.
        """
        handles = tables_of(self.model)
        names = list(handles) if tables is None else [tables] if isinstance(tables, str) else list(tables)
        if unknown := [name for name in names if name not in handles]:
            raise KeyError(f"No table '{unknown[0]}' in this model; it has: {', '.join(handles)}.")
        channel = self.connection.main
        channel.barrier()  # nobody is in a step any more
        for name in names:
            handles[name].clear()
        channel.barrier()
