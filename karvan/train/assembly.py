"""Builds the parts of training and evaluation, for the Trainer and the contexts alike.

`Trainer`, `TrainContext`, `EvalContext` and `InferContext` all start here: `make_model_setup` makes what runs
a model on batches, `make_training_setup` adds what trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from karvan import distributed
from karvan.dense.communication import DenseCommunication, make_stepping
from karvan.dense.step_policies import LocalDense
from karvan.distributed import Connection
from karvan.embedding.optim.base import SparseOptimizer
from karvan.train.epoch import Accumulation
from karvan.train.feed import Feed, RankRounds, feed, prefetch_of
from karvan.train.losses import Check, no_check
from karvan.train.preflight import check_connection, check_trained
from karvan.train.step.data_parallel import make_parallel
from karvan.train.step.device_placement import Placement, device_of, make_placement, target_device
from karvan.train.step.optimizer_step import (
    DenseOptimizer,
    Frozen,
    OptimizerStep,
    OptimizerStepSettings,
    Patterns,
    engines_of,
    fuse_on_gpu,
    make_dense,
    make_sparse,
)
from karvan.train.step.precision import Precision, make_precision
from karvan.train.step.step_routine import StepRoutine
from karvan.train.types import model_input, same


@dataclass(frozen=True)
class ModelSetup:
    """What runs a model on batches."""

    model: nn.Module
    device: torch.device
    connection: Connection
    precision: Precision
    placement: Placement
    prefetch: int

    def infer(self, batch: Any) -> Any:
        """The output for a batch on the model's device, without gradients."""
        with torch.no_grad(), self.placement.forward(), self.precision.context(), self.precision.forward():
            return self.model(model_input(batch))

    def evaluation_feed(self, data: Iterable[Any]) -> Feed:
        """The batches of data, prepared for `infer`; a rank without data gets empty ones for the others."""
        place = partial(self.placement.place, training=False)
        return feed(
            data,
            place,
            prefetch=self.prefetch,
            rounds=RankRounds(self.connection, "evaluate"),
            within=self.placement.feed_context(),
        )


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


def make_model_setup(
    model: nn.Module,
    *,
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
    *,
    dense_optimizer: DenseOptimizer | None,
    sparse_optimizer: SparseOptimizer | None,
    frozen: Patterns,
    settings: OptimizerStepSettings,
    communication: DenseCommunication,
    global_accumulation_steps: int | None = None,
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
