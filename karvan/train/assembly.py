"""Builds the parts of training and evaluation, for the Trainer and the contexts alike.

`Trainer`, `TrainContext`, `EvalContext` and `InferContext` all start here: `make_model_setup` makes what runs
a model on batches, `make_training_setup` adds what trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from karvan import distributed
from karvan.data.columns.kinds import ColumnKind
from karvan.data.identity import Identity
from karvan.dense.communication import DenseCommunication, make_stepping
from karvan.dense.steps import LocalDense
from karvan.embedding.optim.base import SparseOptimizer
from karvan.train.callbacks import Callbacks, TrainerView
from karvan.train.data_parallel import make_parallel
from karvan.train.device_placement import device_of, make_placement, target_device
from karvan.train.epoch import Accumulation
from karvan.train.evaluation import Evaluator, ModelSetup
from karvan.train.feed import prefetch_of
from karvan.train.loggers import LoggerGroup
from karvan.train.losses import Check, no_check
from karvan.train.optimizer_step import (
    DenseOptimizer,
    Frozen,
    OptimizerStep,
    OptimizerStepSettings,
    Patterns,
    Schedule,
    engines_of,
    fuse_on_gpu,
    make_dense,
    make_sparse,
)
from karvan.train.precision import make_precision
from karvan.train.preflight import check_connection, check_trained
from karvan.train.progress import NoProgress
from karvan.train.results import ReportWindow, TrainingCounts
from karvan.train.saving import NoSaver
from karvan.train.step_routine import StepRoutine
from karvan.train.stopping import StopRequest
from karvan.train.types import same


@dataclass(frozen=True)
class TrainingSetup:
    """What trains a model: how it runs, what is frozen, who has dense parameters, how steps are made."""

    runs: ModelSetup
    frozen: Frozen
    dense: LocalDense
    update: OptimizerStep
    passes: Accumulation
    routine: StepRoutine
    communication: DenseCommunication

    def check(self) -> None:
        """Raise unless all of the model is trained or frozen, under the program's connection."""
        check_trained(self.runs.model, self.update, self.frozen, self.runs.connection)


@dataclass
class RunProgress:
    """How far a Trainer's run is, from one fit to the next."""

    counts: TrainingCounts
    window: ReportWindow
    data_identity: Identity | None = None  # of the last fit without checkpoints
    columns: Mapping[str, ColumnKind] = field(default_factory=dict)  # that the model was trained with
    banner_shown: bool = False  # a Trainer shows its banner once


class TrainerParts(TrainerView, Protocol):
    """A Trainer, as its fits, reports and checkpoints use it."""

    setup: TrainingSetup
    schedule: Schedule
    callbacks: Callbacks
    saver: NoSaver
    evaluator: Evaluator
    loggers: LoggerGroup
    progress: NoProgress
    log_every: int | None  # None: `report_period`, and progress may show numbers between
    resume_hint: str  # for people, after Ctrl-C
    nonfinite: str
    run_progress: RunProgress
    stop_request: StopRequest

    def count(self, output: Any, batch: Any) -> None:
        """Count the output for a batch in all metrics."""
        for metric in self.metrics.values():
            metric.update(output, batch)

    def metric_values(self) -> dict[str, float]:
        """The values of all metrics, of the batches counted so far."""
        return {name: metric.compute() for name, metric in self.metrics.items()}

    def metric_states(self) -> dict[str, Any]:
        """The states of all metrics, which others can merge."""
        return {name: metric.state() for name, metric in self.metrics.items()}

    @property
    def counts(self) -> TrainingCounts:
        """How far training is."""
        return self.run_progress.counts

    @property
    def window(self) -> ReportWindow:
        """The losses since the last report."""
        return self.run_progress.window


def make_model_setup(
    model: nn.Module,
    precision: str | torch.amp.GradScaler,
    device: torch.device | str | None,
    prefetch: int,
    prepare: Callable[[Any], Any] = same,
    check: Check = no_check,
) -> ModelSetup:
    """What runs this model, moved to the device, or to its tables on a GPU. The arguments are a Trainer's."""
    connection = distributed.current()
    prefetch = prefetch_of(prefetch, connection)
    where = target_device(model, device)
    moved = model if device is None and where == device_of(model) else model.to(where)
    engines = engines_of(moved)
    for engine in engines:  # batches that wait, in training and in an evaluation at the same time
        engine.hold_prepared(2 * prefetch + 2)
    return ModelSetup(
        moved,
        where,
        connection,
        make_precision(precision, where, engines),
        make_placement(moved, where, prepare, engines if prefetch else [], check),
        prefetch,
    )


def make_training_setup(
    runs: ModelSetup,
    dense_optimizer: DenseOptimizer | None,
    sparse_optimizer: SparseOptimizer | None,
    frozen: Patterns,
    settings: OptimizerStepSettings,
    communication: DenseCommunication,
    global_accumulation_steps: int | None = None,
    *,
    must_train: bool,
) -> TrainingSetup:
    """What trains a model; a collective. must_train: a model that is not trained completely is an error."""
    model, connection, engines = runs.model, runs.connection, engines_of(runs.model)
    passes = Accumulation(
        settings.gradient_accumulation_steps,
        global_accumulation_steps,
        connection.rank,
        connection.world_size,
        connection.joint_steps,
    )
    frozen_parts = Frozen(model, frozen)
    optimizer = make_dense(dense_optimizer, model, frozen_parts)
    if (
        optimizer is not None
        and optimizer is not dense_optimizer
        and not connection.settings.mode.dense_on_servers
    ):
        fuse_on_gpu(optimizer)
    communication.check(
        connection,
        scaled=runs.precision.always_checks,
        only_rows=optimizer is None and sparse_optimizer is not None,
    )
    dense = make_stepping(model, optimizer, engines, connection, runs.prefetch, communication)
    sparse = make_sparse(sparse_optimizer, model, frozen_parts)
    update = OptimizerStep(optimizer, sparse, settings, runs.precision, dense, frozen_parts)
    if must_train:
        check_trained(model, update, frozen_parts, connection)
    elif update.optimizers:  # a Trainer that only evaluates may have local rows
        check_connection(model, connection)
    for engine in engines:
        engine.hold_prepared(2 * runs.prefetch + passes.count + 2)
    parallel = make_parallel(model, connection, communication)
    # PowerSGD undoes what it has sent of a step that is skipped, so the host must know of it.
    late = runs.device.type == "cuda" and communication.powersgd is None
    routine = StepRoutine(runs.placement, runs.precision, parallel, passes, update, late)
    return TrainingSetup(runs, frozen_parts, dense, update, passes, routine, communication)
