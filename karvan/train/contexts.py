"""Custom loops: `TrainContext` trains with the parts of a Trainer's steps, `EvalContext` and `InferContext`
compute outputs and change nothing.

| in the loop | what happens |
|---|---|
| `for batch in ctx.loader(data)` | batches are taken in advance, in groups that make a step; one epoch |
| `ctx.forward(batch)` | moved to the device, autocast, by DistributedDataParallel on several ranks |
| `ctx.backward(loss)` | scaled and weighted; the last pass of a step makes it, dense and sparse, or neither |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from inspect import GEN_CLOSED, getgeneratorstate
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from karvan import checkpoint as checkpoints
from karvan import distributed
from karvan.checkpoint import Checkpoint, Checkpoints, Pending
from karvan.checkpoint.table_files import tables_of
from karvan.data.identity import Identity
from karvan.dense.communication import DenseCommunication, DenseReduce
from karvan.distributed import Connection
from karvan.embedding.optim.base import SparseOptimizer
from karvan.errors import Training
from karvan.job.checkpoint_url import local_path
from karvan.label_columns import refuse_missing, required_values
from karvan.owner import Ownership
from karvan.train import dataset, train_state
from karvan.train.assembly import TrainingSetup, make_model_setup, make_training_setup
from karvan.train.dataset import FinishedData, Transforms, with_newest
from karvan.train.device_placement import make_placement
from karvan.train.epoch import Epoch
from karvan.train.evaluation import ModelSetup, evaluating
from karvan.train.feed import FedBatch, Feed
from karvan.train.optimizer_step import DenseOptimizer, OptimizerStepSettings, Patterns, engines_of
from karvan.train.preflight import check_data
from karvan.train.results import (
    ReportWindow,
    TrainingCounts,
    random_state,
    same_random_state_afterwards,
    set_random_state,
    summed,
)
from karvan.train.saving import FolderSaves, SaveSettings, Snapshot, is_outage, own_together
from karvan.train.step_routine import StepBatches, StepOutcomes, StepPass
from karvan.train.train_state import check_fits
from karvan.train.types import Losses, Positioned, same, samples_of


class ContextLoader:
    """Data in a context; each iteration starts from the beginning, or where the context says."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


Labels: TypeAlias = str | Sequence[str] | None


def full(output: Any) -> Any:
    """The output with half precision as float32, so that its loss is not rounded."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, Mapping):
        return {name: full(value) for name, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(full, output))
    return type(output)(map(full, output)) if isinstance(output, list | tuple) else output


def names_of(label: Labels) -> list[str]:
    """The columns that `label` means."""
    return [] if label is None else [label] if isinstance(label, str) else list(label)


def labels_of(batch: Mapping[str, Any], label: Labels, device: torch.device) -> Any:
    """The column of that name, or several by name, on a device; None for None."""
    if label is None:
        return None
    if isinstance(label, str):
        return _column(batch, label, device)
    return {name: _column(batch, name, device) for name in label}


def _column(batch: Mapping[str, Any], name: str, device: torch.device) -> Any:
    if name not in batch:
        raise KeyError(
            f"There is no label '{name}' in the batch, which has: {', '.join(map(str, batch.keys()))}. "
            "Name the right column with label=, or set label=None if there is none."
        )
    return refuse_missing(name, batch[name]).to(device)


class EvalContext:
    """Evaluate a model in a loop of your own.

    Inside, the model is in eval mode, no row is inserted, and keys without a row give zeros. Afterwards the
    mode of every module and the state of random generators are restored. With several ranks, each takes its
    share of the data, and all call `forward` for every batch of a loader.

    Args:
        model: A torch module. It is called with a batch.
        label: The column, or columns, that `forward` returns with the output; None for none.
        precision: "fp32", "bf16", "fp16" or "auto".
        device: Where the model is placed.
        prefetch: How many batches are read while one is computed.

    Example:
        >>> model = kv.models.DLRM([], ids=["user", "item"], dim=8)
        >>> data = kv.data.read(
        ...     {"user": [1, 2], "item": [7, 8], "label": [1.0, 0.0]}, batch_size=2
        ... )
        >>> with kv.EvalContext(model) as context:
        ...     for batch in context.loader(data):
        ...         output, labels = context.forward(batch)
        >>> output.shape, labels
        (torch.Size([2]), tensor([1., 0.]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label: Labels = "label",
        precision: str = "fp32",
        device: torch.device | str | None = None,
        prefetch: int = 2,
    ) -> None:
        self._begin(
            make_model_setup(model, precision=precision, device=device, prefetch=prefetch),
            Transforms(),
            label,
        )

    @classmethod
    def of(cls, runs: ModelSetup, transforms: Transforms, label: Labels) -> Self:
        """Make a context that shares the parts of another one.

        Args:
            runs: The model and how it runs.
            transforms: The transforms of the data.
            label: The column, or columns, that `forward` returns with the output.

        Returns:
            The context.
        """
        context = cls.__new__(cls)
        context._begin(runs, transforms, label)
        return context

    def _begin(self, runs: ModelSetup, transforms: Transforms, label: Labels) -> None:
        self._runs = runs
        self._transforms = transforms
        self._label = label
        self._stack: ExitStack | None = None
        self._feed: Feed | None = None
        self._loader_batch: Any = None  # the batch that the loader gave last
        self.model = runs.model
        self.device = runs.device

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError(f"This {type(self).__name__} has been entered already.")
        with ExitStack() as stack:
            stack.enter_context(same_random_state_afterwards())
            stack.enter_context(evaluating(self.model))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        feed, self._feed, self._loader_batch = self._feed, None, None
        assert stack is not None
        with stack:
            if feed is not None:
                feed.__exit__(kind, error, trace)

    def loader(self, data: Iterable[Any]) -> ContextLoader:
        """Return the batches of data, read and prepared in advance.

        Args:
            data: Any iterable of batches.

        Returns:
            An iterable of batches.
        """
        self._require("loader")
        check_data("loader", data)
        return ContextLoader(lambda: self._batches(data))

    def _batches(self, data: Iterable[Any]) -> Iterator[Any]:
        self._require("A loader")
        if self._feed is not None:
            raise RuntimeError(
                "Another loader of this context has not come to its end: expected one at a time."
            )
        runs = self._runs
        self._transforms.use(data)
        self._transforms.match_loaders()
        required = required_values(data, names_of(self._label))
        with required, runs.evaluation_feed(data) as batches:
            self._feed = batches
            try:
                for fed in batches:
                    runs.placement.receive(fed.batch)
                    self._loader_batch = fed.batch
                    if fed.samples or runs.connection.world_size == 1:
                        yield fed.batch
                    else:  # it is only for the other ranks
                        runs.infer(fed.batch)
            finally:
                self._feed = self._loader_batch = None

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Compute the model's output for a batch.

        Args:
            batch: A batch of the loader, one made from it, or any other.

        Returns:
            The output, as float32 where it was computed in half precision, and the labels.
        """
        output, used = self._output("forward", batch)
        return output, labels_of(used, self._label, self.device)

    def _output(self, method: str, batch: Any) -> tuple[Any, Any]:
        self._require(method)
        if batch is not self._loader_batch:  # it may not be the loader's
            batch = self._runs.placement.place(batch, training=False)
            self._runs.placement.receive(batch)
        return full(self._runs.infer(batch)), batch

    def _require(self, method: str) -> None:
        if self._stack is None:
            raise RuntimeError(
                f"{method} was called outside of the context: expected it inside of "
                f"`with {type(self).__name__}(…) as ctx:`."
            )


class InferContext(EvalContext):
    """Predict with a model in a loop of your own.

    It needs no optimizer, and ignores the optimizers' state in the checkpoint. Transforms of data passed to
    `loader` take their statistics from it. On parameter servers, the checkpoint replaces the content of the
    tables. No row is ever inserted.

    Args:
        model: A torch module. It is called with a batch.
        checkpoint: A checkpoint, or a run's folder for its newest one. Without it, the model and its rows are
            used as they are.
        label: The column, or columns, that `forward` returns with the output; None for none.
        precision: "fp32", "bf16", "fp16" or "auto".
        device: Where the model is placed.
        prefetch: How many batches are read while one is computed.

    Raises:
        CheckpointError: The checkpoint does not fit this model, or is damaged.

    Example:
        >>> model = kv.models.DLRM([], ids=["user", "item"], dim=8)
        >>> with kv.InferContext(model) as context:
        ...     batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([7, 8])}
        ...     output = context.predict(batch)
        >>> output.shape
        torch.Size([2])
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        label: Labels = None,
        precision: str = "fp32",
        device: torch.device | str | None = None,
        prefetch: int = 2,
    ) -> None:
        super().__init__(model, label=label, precision=precision, device=device, prefetch=prefetch)
        self.step: int | None = None  # that of the checkpoint
        if checkpoint is not None:
            checkpoint_ = checkpoints.find(checkpoint)
            state = checkpoint_.load(model)
            if "model" not in state:
                raise checkpoints.CheckpointError.mismatch(
                    checkpoint_.path, "a model's state", ", ".join(state)
                )
            check_fits(model, state, checkpoint_.path)
            model.load_state_dict(state["model"])
            self._transforms.load(state)
            self.step = checkpoint_.step

    def predict(self, batch: Any) -> Any:
        """Compute the model's output for a batch.

        Args:
            batch: A batch. It needs no labels.

        Returns:
            The output on the model's device, as float32 where it was computed in half precision.
        """
        return self._output("predict", batch)[0]


# The saves of a TrainContext: failures of the storage are tolerated for a while.
#
# The program decides when to save, so the last save of a context is the one before it is left. If that
# failed, leaving the context repeats it, which gives the same checkpoint as long as nothing was trained
# since; otherwise leaving raises its error.
#
# From the first save into a folder until the context is left, the folder belongs to this process
# (`karvan.owner`).


class ContextSaves:
    """Saves snapshots into folders, each of which belongs to this process while `training`."""

    def __init__(self, settings: SaveSettings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._folders: dict[Path, FolderSaves] = {}
        self._owned: dict[Path, Ownership | None] = {}
        self.training = False

    def save(
        self, folder: str | os.PathLike[str] | Checkpoints, snapshot: Snapshot, *, block: bool
    ) -> Pending:
        """Save a snapshot; it is written in the background unless `block`."""
        named = folder.folder if isinstance(folder, Checkpoints) else folder
        path = Path(os.path.abspath(local_path(named)))
        if self.training and path not in self._owned:
            self._owned[path] = own_together(path, self._connection)
        saves = self._folders.get(path)
        if saves is None or (isinstance(folder, Checkpoints) and saves.checkpoints is not folder):
            checkpoints = folder if isinstance(folder, Checkpoints) else Checkpoints(path)
            saves = self._folders[path] = FolderSaves(checkpoints, self._settings, self._connection)
        return saves.save(snapshot, block=block)

    def wait(self) -> None:
        """Wait until everything is written; raise an error that is not tolerated."""
        for saves in self._folders.values():
            saves.wait()

    def finish(self, step: int) -> None:
        """Wait, and repeat a last save that failed; `step` is the current step of training."""
        for saves in self._folders.values():
            saves.settle()
            if saves.newest is None or saves.error is None:
                continue
            if saves.newest.step != step or not is_outage(saves.error):
                raise saves.error
            saves.repeat(saves.newest)

    def release(self) -> None:
        """Release the folders."""
        self.training = False
        owned, self._owned = self._owned, {}
        for ownership in owned.values():
            if ownership is not None:
                ownership.release()


class ContextData:
    """Which data the loaders of a `TrainContext` read, and where they are in it."""

    def __init__(self, setup: TrainingSetup, counts: TrainingCounts) -> None:
        self.transforms = Transforms()
        self.epoch: Epoch | None = None  # of the loader that was used last
        self._setup = setup
        self._counts = counts
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

    def begin_epoch(self, data: Iterable[Any], name: str | None) -> Epoch:
        """The epoch of the next loader of data: a new one, or the rest of one."""
        runs = self._setup.runs
        self.transforms.use(data)
        self.transforms.match_loaders()
        self.transforms.require_fitted(runs.model)
        same_data = data is self._data and isinstance(data, Positioned)
        if self._saved is None and same_data and self.epoch is not None:
            return self.epoch
        name, self._data_name = self._data_name if name is None else name, None
        if self._loaded is not None:
            if self.is_other(self._loaded, data, name, self._drop_unfinished):
                self.begin()
        elif data is not self._data:
            self._change(dataset.identify(data, name, self._connection))
        if self._saved is None:
            self._counts.batches = 0
        self.transforms.require_equal(self._connection.main, runs.model)
        passes = self._setup.passes
        epoch = Epoch(data, self._connection, runs.placement, passes, self._counts, runs.prefetch)
        self._data = data
        if self._saved is not None:
            epoch.load(self._saved, random_state(), self._drop_unfinished)
            self._saved = self._loaded = None
        self.epoch = epoch
        return epoch

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of the data."""
        data: dict[str, Any] = {"position": None, "epoch_random": None}
        if self.epoch is not None:
            data = self.epoch.state()
        finished = self._counts.batches == 0 and (self._counts.epoch > 0 or self._identity is None)
        data["data"] = dataset.state_of(self._identity, finished, past=self._past)
        if self._saved is not None:  # nothing was trained since it was loaded
            data = {name: self._saved.get(name, data[name]) for name in data}
        return {**data, **self.transforms.state()}

    def load(
        self, saved: Mapping[str, Any], checkpoint: Checkpoint, name: str | None, drop_unfinished: bool
    ) -> None:
        """The next loader continues where a checkpoint was saved, with the data of this name."""
        self.transforms.load(saved)
        self._saved, self._loaded, self._data_name = saved, checkpoint, name
        self._drop_unfinished = drop_unfinished

    def is_other(self, checkpoint_: Checkpoint, data: Any, name: str | None, drop_unfinished: bool) -> bool:
        """Whether data is other data than a checkpoint's; see `dataset.py`. A collective."""
        self._identity = dataset.identify(data, name, self._connection)
        other, self._past, self._before = dataset.compare(checkpoint_, self._identity, drop_unfinished)
        return other

    def begin(self) -> None:
        """The next loader has new data, to which the position of the checkpoint's data does not apply."""
        dataset.begin_data(self._counts, self._before)
        self._data_begin = (self._counts.epoch, self._counts.step)
        self._saved = self._loaded = None

    def _change(self, identity: Identity | None) -> None:
        """The next loader has this data; data before it counts as trained if its loader has ended."""
        before, (epoch, step) = self._identity, self._data_begin
        self._identity = identity
        if before is not None and identity is not None and before.id == identity.id:
            return
        counts, epochs = self._counts, self._counts.epoch - epoch
        if before is not None and not before.grows and epochs > 0 and counts.batches == 0:
            newest = FinishedData(before.id, before.label, counts.step, epochs, counts.step - step)
            self._past = with_newest(self._past, newest)
        self._data_begin = (counts.epoch, counts.step)


# The steps of a custom loop: a forward and a backward for each batch, the last of which applies the step.
#
# Between a forward and its backward, the pass is remembered: its weight, and whether it is a step's last,
# which DistributedDataParallel must know before the forward.


class ContextSteps:
    """Makes the steps of a `TrainContext`'s batches, and counts them.

    raises: a step that is skipped raises a FloatingPointError, except for the overflows of fp16.
    """

    def __init__(self, setup: TrainingSetup, counts: TrainingCounts, raises: bool) -> None:
        runs = setup.runs
        self._setup = setup
        self._routine = setup.routine
        self._counts = counts
        self._moving = make_placement(runs.model, runs.device, same, [])
        scaled, first = runs.precision.always_checks, runs.connection.rank == 0
        self._outcomes = StepOutcomes(counts, scaled, first, raises)
        self._turn: StepPass | None = None  # the batch that the loader gave, until its forward
        self._pass: StepPass | None = None  # the forward that waits for its backward
        self._step: StepBatches | None = None  # a step of which some batches, but not all, have been trained

    @property
    def in_step(self) -> bool:
        """Whether a step is in progress."""
        return self._pass is not None or self._step is not None

    def forget(self) -> None:
        """Drop the step that is in progress, if there is one."""
        self._turn = self._pass = self._step = None
        self._setup.update.forget()

    def end(self) -> None:
        """Training has ended; raises if all of its steps were skipped."""
        self.settle()
        if self._setup.passes.together:  # only then do all ranks come to the same result
            self._outcomes.end()

    def settle(self) -> None:
        """Wait until it is known, and counted, which steps were skipped."""
        self._outcomes.settle()

    def batches(self, epoch: Epoch, required: AbstractContextManager[None]) -> Generator[Any, None, None]:
        """The batches of an epoch, one after the other, each of which must be trained.

        required: the context in which the data is read.
        """
        trained = True
        try:
            with required, closing(epoch.groups()) as groups:
                for group in groups:
                    step = self._routine.begin(group, epoch)
                    trained = False
                    for index, fed in enumerate(group):
                        self._setup.runs.placement.receive(fed.batch)
                        self._turn = StepPass(step, index)
                        yield fed.batch
                    trained = step.done == len(group)
                    if step.done and not trained:
                        raise _incomplete(step)
            epoch.end_epoch()
        finally:
            self._turn = None
            if self._step is not None:
                self._step = None
                self._setup.update.forget()
            if not trained:
                epoch.move_back()

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """The output for a batch, and the batch on the model's device."""
        if self._pass is not None:
            raise RuntimeError(
                "forward was called twice: expected backward(loss) in between. For outputs without "
                "training, use ctx.eval()."
            )
        if not self._setup.runs.model.training:
            raise RuntimeError("forward trains, but the model is in eval mode: expected train mode.")
        this_pass, batch = self._pass_of(batch)
        if not this_pass.index:
            self._setup.dense.fresh()
        self._routine.forward(this_pass, batch)
        self._pass, self._turn = this_pass, None
        return this_pass.output, batch

    def _pass_of(self, batch: Any) -> tuple[StepPass, Any]:
        if self._turn is not None and batch is self._turn.batch:
            return self._turn, batch
        moved = self._moving.place(batch)
        self._moving.receive(moved)
        samples = samples_of(moved)
        if self._turn is not None and samples == samples_of(self._turn.batch):
            return self._turn, moved
        gradient_accumulation_steps = self._setup.passes.gradient_accumulation_steps
        if gradient_accumulation_steps > 1:
            raise RuntimeError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} needs batches of ctx.loader, "
                "which counts them for each step, got another batch."
            )
        channel = self._setup.runs.connection.main
        every = samples if channel.world_size == 1 else int(channel.sum(torch.tensor([samples]))[0])
        return StepPass(self._routine.begin([FedBatch(moved, None, samples, every)]), 0), moved

    def backward(self, losses: Losses) -> bool | Tensor:
        """Go backward from the loss of the last forward; whether a step was made by it."""
        this_pass = self._pass
        if this_pass is None:
            raise RuntimeError(
                "backward was called without a forward: expected output, labels = ctx.forward(batch) before."
            )
        loss = self._routine.add_loss(this_pass, losses)
        if not loss.requires_grad:
            raise ValueError(
                "The loss depends on nothing that is trained: expected a loss computed from the output "
                "of forward, without detach, item or torch.no_grad."
            )
        self._pass = None
        step = this_pass.step
        self._routine.backward(this_pass)
        if not this_pass.last:
            self._step = step
            return False
        if step.done < len(step.group):
            raise _incomplete(step)
        self._step = None
        applied = self._routine.apply(step)
        self._count(step)
        self._outcomes.add(self._counts.step, applied, [fed.batch for fed in step.group], loss.detach())
        return applied if isinstance(applied, Tensor) else bool(applied)

    def _count(self, step: StepBatches) -> None:
        if step.epoch is not None:
            step.epoch.trained(step.group, step.epoch.samples(step.group))
        else:
            Training.started = True
            self._counts.step += 1
            self._counts.samples += sum(fed.all_samples for fed in step.group)


def _incomplete(step: StepBatches) -> RuntimeError:
    return RuntimeError(
        f"Of a step's {len(step.group)} batches {step.done} were trained: expected forward and backward for "
        "each of them."
    )


_in_use: WeakSet[nn.Module] = WeakSet()  # models that are in a context


class TrainContext:
    """Train a model in a loop of your own.

    The context does what a Trainer does in a step: mixed precision, accumulation, both optimizers, and the
    work of several ranks. Outputs are float32 in any precision.

    After `kv.connect` in several processes all of them run the same loop, each with its share of the data. A
    rank whose data has ended receives batches without samples until all have ended; their labels are empty,
    and `backward` ignores their loss. In mode async each rank makes its own steps on parameters that servers
    hold; leaving the context loads the final parameters into the model.

    Args:
        model: A torch module. It is called with a batch.
        sparse_optimizer: An optimizer of `kv.optim` for the rows of tables.
        dense_optimizer: A torch optimizer, or a function that makes one from parameters.
        frozen: Names of tables, parameters and modules that are not trained, such as `["user", "net.*"]`.
        precision: "fp32", "bf16", "fp16" or "auto", as of a [`Trainer`][karvan.Trainer]; or a
            `torch.amp.GradScaler`, which scales the loss of fp32 arithmetic.
        label: The column, or columns, that `forward` returns with the output; None for none.
        gradient_accumulation_steps: How many batches make one step, by their mean gradient.
        clip_norm: The largest L2 norm of all dense gradients together.
        clip_value: The largest absolute value of an element of a dense gradient.
        nonfinite: What happens if a gradient is infinite or NaN: "skip", "raise", "skip_tables" or "apply".
        dense_reduce: How ranks average dense gradients: "mean", "bf16", "fp16" or "powersgd".
        average_every: 1 averages gradients in every step; above 1 parameters are averaged every so many
            steps.
        find_unused_parameters: Set it if parameters take no part in some batches.
        device: Where the model is placed. By default it goes to the GPU that has its tables, or stays where
            it is.
        prefetch: How many batches are read while one is computed.
        tolerate_failed_saves: How many saves in a row may fail because of the disk or the servers. Each is a
            warning; one more is an error.
        save_retry_seconds: How long leaving the context repeats a last save that has failed, if nothing was
            trained since. Then it raises the error.

    Raises:
        ValueError: An argument is out of range, or the job's mode needs a Trainer.

    Example:
        >>> class Rating(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.tables = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        ...         self.out = torch.nn.Linear(4, 1)
        ...     def forward(self, batch):
        ...         vectors = self.tables({"user": batch["user"]})
        ...         return self.out(vectors["user"]).squeeze(1)
        >>> data = kv.data.read(
        ...     {"user": [1, 2, 3, 1], "label": [1.0, 0.0, 1.0, 1.0]}, batch_size=2
        ... )
        >>> with kv.TrainContext(
        ...     Rating(),
        ...     sparse_optimizer=kv.optim.Adagrad(lr=0.05),
        ...     dense_optimizer=torch.optim.Adam,
        ... ) as context:
        ...     for batch in context.loader(data):
        ...         output, labels = context.forward(batch)
        ...         loss = torch.nn.functional.mse_loss(output, labels)
        ...         made = context.backward(loss)
        >>> context.step
        2
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
        connection = distributed.current()
        if connection.settings.dense.rejects:
            raise ValueError(
                "With grads_to_wait or tolerance servers may reject a step, and a custom loop cannot "
                "compute it again: expected mode async without them, or a kv.Trainer."
            )
        if connection.group is not None:
            raise ValueError(
                "Trainers of a job with sharding: dynamic come and go, and a custom loop cannot agree with "
                "them on its steps: expected a kv.Trainer, or sharding: static."
            )
        settings = OptimizerStepSettings(gradient_accumulation_steps, clip_norm, clip_value, nonfinite)
        communication = DenseCommunication(dense_reduce, average_every, find_unused_parameters)
        self._saves = ContextSaves(
            SaveSettings(tolerate=tolerate_failed_saves, retry_seconds=save_retry_seconds), connection
        )
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
        self.counts = TrainingCounts()
        self._data = ContextData(self._setup, self.counts)
        self._steps = ContextSteps(self._setup, self.counts, raises=nonfinite == "raise")
        self.model = runs.model
        self.device = runs.device
        self.connection = runs.connection
        self.precision = runs.precision
        self.update = self._setup.update
        self.dense = self._setup.dense
        self._label = label
        self._entered = False
        self._batches: ref[Generator[Any, None, None]] | None = None  # an iteration that the loop holds

    @property
    def dense_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the dense parameters, for schedulers; None if there is none."""
        return self.update.optimizers.get("dense")

    @property
    def sparse_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the rows, for schedulers; None if there is none."""
        return self.update.optimizers.get("sparse")

    @property
    def step(self) -> int:
        """The number of optimizer steps so far, skipped ones included."""
        return self.counts.step

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped because a gradient was not finite.

        On a GPU, reading it waits for the GPU.
        """
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
            if error is not None and self._data.epoch is not None:
                self._data.epoch.abandon(error)
            batches.close()
        self._steps.forget()
        if error is None:
            self.dense.take()
            self._saves.finish(self.step)
            self._steps.end()

    def loader(self, data: Iterable[Any], *, data_name: str | None = None) -> ContextLoader:
        """Return the batches of data, read and prepared in advance.

        Every iteration is an epoch.

        After `load`, the first iteration continues where the checkpoint was saved if the data is the same. If
        an iteration is left early, data that has a position moves to the end of the last step, and the next
        iteration continues there.

        Args:
            data: Any iterable of batches.
            data_name: The name of this data in checkpoints, for data that does not know what it reads.

        Returns:
            An iterable of batches.
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
        epoch = self._data.begin_epoch(data, name)
        yield from self._steps.batches(epoch, required_values(data, names_of(self._label)))

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Compute the model's output for a batch.

        Args:
            batch: A batch of the loader, one made from it, or any other. With several ranks, each brings one;
                they are weighted by their numbers of samples.

        Returns:
            The output, and the labels of the batch.
        """
        self._require("forward")
        output, used = self._steps.forward(batch)
        return full(output), labels_of(used, self._label, self.device)

    def backward(self, loss: Losses) -> bool | torch.Tensor:
        """Compute the gradients of a loss, and make the step if this was its last batch.

        Args:
            loss: The mean loss over the batch. Several losses by name are summed.

        Returns:
            Whether a step was made: False if it was skipped, or is not complete. It is a tensor where the GPU
            decides; bool() reads it, and waits.

        Raises:
            FloatingPointError: A gradient is not finite, and `nonfinite` is "raise".
        """
        self._require("backward")
        return self._steps.backward(loss)

    def eval(self) -> EvalContext:
        """Return a context that evaluates the model as it is now, and changes nothing of training.

        All ranks call it together.

        Returns:
            The context.
        """
        self._require("eval")
        self.dense.settle()
        return EvalContext.of(self._runs, self._data.transforms, self._label)

    def save(
        self,
        folder: str | os.PathLike[str] | Checkpoints,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        block: bool = True,
    ) -> Pending:
        """Save a checkpoint into a run's folder, to resume from with `load`.

        It has the model, its tables, optimizers, scaler, counts, random generators, the statistics of
        transforms, and the position of the loader used last. All ranks save together, between two steps. If
        the disk or the servers refuse, that is a warning, and the result's `error` says why; see
        `tolerate_failed_saves`.

        Args:
            folder: The run's folder, or a `kv.Checkpoints`.
            extra: A tree of your own to save, such as a scheduler's `state_dict`.
            metrics: Numbers of this step, by which `Checkpoints` chooses the best.
            block: Whether to wait until it is written. Otherwise it is written in the background, and leaving
                the context waits.

        Returns:
            The save, which can be waited for.

        Raises:
            RuntimeError: It was called in the middle of a step.
            CheckpointError: Too many saves in a row have failed.
        """
        if self.in_step:
            raise RuntimeError("save was called in the middle of a step: expected it after its backward.")
        self._steps.settle()
        self.dense.take()
        rank_state = {"metrics": {}, "window": ReportWindow().state_dict()}
        state = {
            **train_state.take_trained(self._setup, self.counts, rank_state),
            **self._data.state(),
            "scheduler": {"schedulers": []},
            "callbacks": {},
            "extra": dict(extra or {}),
        }
        return self._saves.save(folder, Snapshot(self.step, state, self.model, metrics), block=block)

    def load(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        data: Iterable[Any] | None = None,
        data_name: str | None = None,
        drop_unfinished: bool = False,
    ) -> dict[str, Any]:
        """Load a checkpoint of a TrainContext or a Trainer.

        The next loader continues after the last batch that was trained. A Trainer's schedulers, metrics and
        callbacks are ignored. All ranks load together.

        Args:
            checkpoint: A checkpoint; or a run's folder, of which the newest intact one is loaded. A damaged
                one in a run's folder is set aside with a warning.
            data: The data to train on next. If it is other data than the checkpoint's, `epoch` starts from 0
                and its loader from the beginning; `step` continues.
            data_name: The name of that data.
            drop_unfinished: Allow other data although the checkpoint's was not trained to its end.

        Returns:
            The `extra` that was saved.

        Raises:
            RuntimeError: It was called inside of a loop over a loader.
            CheckpointError: There is no intact checkpoint, or it does not fit this model.
        """
        if self._iteration() is not None or self.in_step:
            raise RuntimeError("load was called inside of a loop over a loader: expected it before or after.")
        self._steps.settle()
        self._saves.wait()

        def read(checkpoint_: Checkpoint) -> tuple[dict[str, Any], bool]:
            is_other = data is not None and self._data.is_other(checkpoint_, data, data_name, drop_unfinished)
            self.update.forget()
            return checkpoint_.load(self.model), is_other

        resumed, (saved, other) = checkpoints.resume_at(checkpoint, read)
        train_state.restore_trained(self._setup, self.counts, saved)
        self._data.load(saved, resumed, data_name, drop_unfinished)
        set_random_state(train_state.random_of(self.connection, saved))
        self.dense.begin()
        if other:
            self._data.begin()
        return dict(saved.get("extra", {}))

    def sizes(self) -> dict[str, int]:
        """Count the rows of each table, over all ranks or servers together.

        All ranks call it.

        Returns:
            The number of rows by table.
        """
        engines = engines_of(self.model)
        mine = {name: rows for engine in engines for name, rows in engine.sizes().items()}
        return {name: int(rows) for name, rows in summed(self.connection.main, mine).items()}

    def clear(self, tables: str | Sequence[str] | None = None) -> None:
        """Remove all rows of some tables.

        All ranks call it.

        The steps that optimizers count for a table continue; gradients of removed rows are dropped.

        Args:
            tables: The names of the tables, or one name; by default all.

        Raises:
            KeyError: There is no such table.
        """
        handles = tables_of(self.model)
        names = list(handles) if tables is None else [tables] if isinstance(tables, str) else list(tables)
        if unknown := [name for name in names if name not in handles]:
            raise KeyError(f"No table '{unknown[0]}' in this model; it has: {', '.join(handles)}.")
        self.connection.main.barrier()  # no rank is in a step any more
        for name in names:
            handles[name].clear()
        self.connection.main.barrier()

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
