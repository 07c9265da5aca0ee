"""`TrainContext`: training in a custom loop, with the parts of the Trainer's steps.

| in the loop | what happens |
|---|---|
| `for batch in ctx.loader(data)` | batches are taken in advance, in groups that make a step; one epoch |
| `ctx.forward(batch)` | moved to the device, autocast, by DistributedDataParallel where several ranks train |
| `ctx.backward(loss)` | scaled and weighted; the last pass of a step makes it, dense and sparse, or neither |
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet, ref

import torch
from torch import nn

from karvan import distributed
from karvan.checkpoint import Checkpoint, Checkpoints, Pending
from karvan.dense.communication import DenseCommunication, DenseReduce
from karvan.embedding.optim.base import SparseOptimizer
from karvan.label_columns import required_values
from karvan.train.assembly import make_model_setup, make_training_setup
from karvan.train.checks.common_mistakes import check_data
from karvan.train.checks.frozen import Patterns
from karvan.train.contexts.context_loader import ContextLoader
from karvan.train.contexts.context_saves import ContextSaves
from karvan.train.contexts.context_state import ContextState
from karvan.train.contexts.context_steps import ContextSteps
from karvan.train.contexts.eval_context import EvalContext
from karvan.train.contexts.model_outputs import Labels, full, labels_of, names_of
from karvan.train.step.optimizer_step import DenseOptimizer, OptimizerStepSettings
from karvan.train.types import Losses

_in_use: WeakSet[nn.Module] = WeakSet()  # models that are in a context


class TrainContext:
    """Trains a model in a custom loop.

    ```
    with kv.TrainContext(model, sparse_optimizer=kv.optim.Adagrad(lr=0.05), dense_optimizer=…) as ctx:
        for batch in ctx.loader(data):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_of(output, labels))
    ```

    dense_optimizer, sparse_optimizer, frozen, precision, gradient_accumulation_steps, clip_norm, clip_value,
    nonfinite, dense_reduce, average_every, find_unused_parameters, device, prefetch: see `Trainer`. The
    optimizers are attributes, for schedulers. precision may be a `torch.amp.GradScaler`, too: arithmetic is
    fp32, and the scaler scales the loss. Outputs are float32 in any precision, so that a loss of them has
    full precision.
    label: the column, or columns, that `forward` returns with the output; None for none.
    tolerate_failed_saves: how many saves in a row the disk or the servers may refuse; each is a warning, and
    one more raises the error. If the last save before the context is left has failed, leaving it repeats the
    save for save_retry_seconds, or raises its error if something was trained since.

    After `kv.connect` in several processes all of them run the same loop, each with its share of the data,
    and go through it equally often: one whose data has ended receives batches without samples until all have
    ended. Their labels are empty, and `backward` ignores their loss. In mode async each makes its own steps
    on parameters that servers hold; leaving the context loads the final parameters into the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sparse_optimizer: SparseOptimizer | None = None,
        dense_optimizer: DenseOptimizer | None = None,
        frozen: Patterns = (),
        precision: str | torch.amp.GradScaler = "fp32",
        label: Labels = "label",
        gradient_accumulation_steps: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        nonfinite: str = "skip",
        dense_reduce: DenseReduce = "mean",
        average_every: int = 1,
        find_unused_parameters: bool = False,
        device: torch.device | str | None = None,
        prefetch: int = 2,
        tolerate_failed_saves: int = 3,
        save_retry_seconds: float = 60.0,
    ) -> None:
        if distributed.current().settings.dense.rejects:
            raise ValueError(
                "With grads_to_wait or tolerance servers may reject a step, which a custom loop cannot "
                "compute again: expected mode async without them, or a kv.Trainer."
            )
        if distributed.current().group is not None:
            raise ValueError(
                "Trainers of a job with sharding: dynamic come and go, and a custom loop cannot agree with "
                "them on its steps: expected a kv.Trainer, or sharding: static."
            )
        settings = OptimizerStepSettings(gradient_accumulation_steps, clip_norm, clip_value, nonfinite)
        communication = DenseCommunication(dense_reduce, average_every, find_unused_parameters)
        self._saves = ContextSaves(tolerate_failed_saves, save_retry_seconds)
        runs = make_model_setup(model, precision=precision, device=device, prefetch=prefetch)
        self._setup = make_training_setup(
            runs,
            dense_optimizer=dense_optimizer,
            sparse_optimizer=sparse_optimizer,
            frozen=frozen,
            settings=settings,
            communication=communication,
            must_train=True,
        )
        self._runs = runs
        self._state = ContextState(self._setup, self._saves)
        self._steps = ContextSteps(self._setup, self._state.counts, raises=nonfinite == "raise")
        self.model = runs.model
        self.device = runs.device
        self.connection = runs.connection
        self.precision = runs.precision
        self.update = self._setup.update
        self.dense = self._setup.dense
        self.counts = self._state.counts
        self._label = label
        self._entered = False
        self._batches: ref[Generator[Any, None, None]] | None = None  # an iteration that the loop holds

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
        """Optimizer steps so far, including skipped ones."""
        return self.counts.step

    @property
    def skipped(self) -> int:
        """Steps that were skipped, because a gradient was not finite; on a GPU this waits for it."""
        self._steps.settle()
        return self.counts.skipped

    @property
    def in_step(self) -> bool:
        """Whether a step is in progress: after a forward, until the backward that completes it."""
        return self._steps.in_step

    @property
    def epoch(self) -> int:
        """How often a loader has reached the end of its data."""
        return self.counts.epoch

    def __enter__(self) -> Self:
        if self.model in _in_use:
            raise RuntimeError("This model is in a TrainContext already: expected one at a time.")
        self._setup.check()
        _in_use.add(self.model)
        self._entered = self._saves.training = True
        self.update.forget()
        self.dense.begin()
        self.model.train()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        _in_use.discard(self.model)
        try:
            self._leave(error)
        finally:
            self._saves.release()

    def _leave(self, error: BaseException | None) -> None:
        if (batches := self._iteration()) is not None:
            if error is not None and self._state.epoch is not None:
                self._state.epoch.abandon(error)
            batches.close()
        self._steps.forget()
        if error is None:
            self.dense.take()
            self._saves.finish(self.step)
            self._steps.end()

    def loader(self, data: Iterable[Any], *, data_name: str | None = None) -> ContextLoader:
        """The batches of data, taken and prepared in advance; every iteration is an epoch.

        After `load`, the first one continues where the checkpoint was saved, if it is of the same data; see
        `load`. One that is left early moves data that has a position to the end of the last step, and the
        next one continues there. data_name: see `Trainer.fit`.
        """
        self._require("loader")
        check_data("loader", data)
        return ContextLoader(lambda: self._iterate(data, data_name))

    def _iterate(self, data: Iterable[Any], name: str | None) -> Iterator[Any]:
        self._require("A loader")
        if self._iteration() is not None:
            raise RuntimeError(
                "Another loader of this context has not come to its end: expected one at a time."
            )
        batches = self._epoch(data, name)
        self._batches = ref(batches)
        return batches

    def _epoch(self, data: Iterable[Any], name: str | None) -> Generator[Any, None, None]:
        epoch = self._state.begin_epoch(data, name)
        yield from self._steps.batches(epoch, required_values(data, names_of(self._label)))

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """The output for a batch, and its labels.

        The batch is the loader's, or made from it, or any other; in that case each of several ranks brings
        one, and they are weighted by their numbers of samples.
        """
        self._require("forward")
        output, used = self._steps.forward(batch)
        return full(output), labels_of(used, self._label, self.device)

    def backward(self, loss: Losses) -> bool | torch.Tensor:
        """Compute the gradients of a loss, a mean over the batch, and make the step if it is complete.

        Returns whether a step was made: False if it was skipped, or before its last batch. On a GPU that
        finds out by itself, this is a tensor; bool() reads it, and waits for the GPU.
        Several losses by name are summed.
        """
        self._require("backward")
        return self._steps.backward(loss)

    def eval(self) -> EvalContext:
        """A context that evaluates the model as it is now, and changes nothing of training.

        All ranks call it together, because in mode async they have to agree on a model.
        """
        self._require("eval")
        self.dense.settle()
        return EvalContext.of(self._runs, self._state.transforms, self._label)

    def save(
        self,
        folder: str | os.PathLike[str] | Checkpoints,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        block: bool = True,
    ) -> Pending:
        """Save a checkpoint into a run's folder, as a Trainer does, to resume from with `load`.

        It has the model, its tables, optimizers, scaler, counts, random generators, the statistics of
        transforms, and the position of the loader used last. extra is a tree of your own, such as a
        scheduler's state_dict. Unless block, it is written in the background; leaving the context waits.
        All ranks save together, between two steps. A save that the disk or the servers refuse is a warning,
        and `error` of the result says why; see `tolerate_failed_saves`.
        """
        if self.in_step:
            raise RuntimeError("save was called in the middle of a step: expected it after its backward.")
        self._steps.settle()
        return self._state.save(folder, extra, metrics, block)

    def load(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        data: Iterable[Any] | None = None,
        data_name: str | None = None,
        drop_unfinished: bool = False,
    ) -> dict[str, Any]:
        """Load a checkpoint, or a run's newest, of a TrainContext or a Trainer; returns its `extra`.

        Of a run's folder the newest intact one is loaded: a damaged one is renamed to damaged-step-…, with a
        warning. A damaged checkpoint that was named is an error.
        The next loader continues after the last batch that was trained. A Trainer's schedulers, metrics and
        callbacks are ignored. All ranks load together.

        data: the data to train on next, with its name if it has one. If it is not the checkpoint's data,
        `epoch` is 0 and its first loader starts at its beginning; `step` continues. If the run has trained it
        to its end before, `epoch` is the number of its epochs, and there is a warning. Other data that was
        not trained to its end is an error, unless drop_unfinished; so is an epoch that was started with
        another kind of data, such as `kv.data.from_loaders()`, which drop_unfinished starts again.
        """
        if self._iteration() is not None or self.in_step:
            raise RuntimeError("load was called inside of a loop over a loader: expected it before or after.")
        self._steps.settle()
        return self._state.load(checkpoint, data, data_name, drop_unfinished)

    def sizes(self) -> dict[str, int]:
        """How many rows each table has, over all ranks or servers together; a collective."""
        return self._state.sizes()

    def clear(self, tables: str | Sequence[str] | None = None) -> None:
        """Remove all rows of these tables, or of all; a collective.

        The counts of optimizers for a table continue; gradients of removed rows are dropped.
        """
        self._state.clear(tables)

    def _iteration(self) -> Generator[Any, None, None] | None:
        """The iteration over a loader that has not reached its end, if there is one."""
        batches = None if self._batches is None else self._batches()
        return None if batches is None or getgeneratorstate(batches) == GEN_CLOSED else batches

    def _require(self, method: str) -> None:
        if not self._entered:
            raise RuntimeError(
                f"{method} was called outside of the context: expected it inside of "
                "`with kv.TrainContext(…) as ctx:`."
            )
