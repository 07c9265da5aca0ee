"""`TrainContext`: a loop of the user's own that trains with the parts of a Trainer's steps.

| in the loop | what happens |
|---|---|
| `for batch in ctx.loader(data)` | batches are taken in advance, in groups that make a step; one epoch |
| `ctx.forward(batch)` | moved to the device, autocast, by DistributedDataParallel on several ranks |
| `ctx.backward(loss)` | scaled and weighted; the last pass of a step makes it, dense and sparse, or neither |

Between a forward and its backward, the pass is remembered: its weight, and whether it is a step's last,
which DistributedDataParallel must know before the forward.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from inspect import GEN_CLOSED, getgeneratorstate
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from typing_extensions import override

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
from karvan.label_columns import required_values
from karvan.train import train_state
from karvan.train.assembly import TrainingSetup, make_model_setup, make_training_setup
from karvan.train.contexts import ContextLoader, EvalContext, Labels, full, labels_of, names_of
from karvan.train.dataset import FinishedData, RunData, Transforms, identify, with_newest
from karvan.train.device_placement import make_placement
from karvan.train.epoch import Epoch
from karvan.train.feed import FedBatch
from karvan.train.optimizer_step import DenseOptimizer, OptimizerStepSettings, Patterns, engines_of
from karvan.train.preflight import check_data
from karvan.train.results import ReportWindow, TrainingCounts, random_state, set_random_state, summed
from karvan.train.saving import FolderSaves, SaveSettings, Snapshot, is_outage, owned_folder
from karvan.train.step_routine import StepBatches, StepOutcomes, StepPass
from karvan.train.types import Losses, Positioned, same, samples_of


class ContextSaves:
    """Saves snapshots into folders, each of which belongs to this process (`karvan.owner`) while `training`.

    The program decides when to save, so the last save of a context is the one before it is left. If that
    failed, because of the storage, leaving the context repeats it, which gives the same checkpoint as long as
    nothing was trained since; otherwise leaving raises its error.
    """

    def __init__(self, settings: SaveSettings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._folders: dict[Path, FolderSaves] = {}
        self._owned: set[Path] = set()
        self._stack = ExitStack()
        self.training = False

    def save(
        self, folder: str | os.PathLike[str] | Checkpoints, snapshot: Snapshot, *, block: bool
    ) -> Pending:
        """Save a snapshot; it is written in the background unless `block`."""
        named = folder.folder if isinstance(folder, Checkpoints) else folder
        path = Path(os.path.abspath(local_path(named)))
        if self.training and path not in self._owned:
            self._stack.enter_context(owned_folder(path, self._connection))
            self._owned.add(path)
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
        self._owned.clear()
        self._stack.close()


class ContextData(RunData):
    """Which data the loaders of a `TrainContext` read, and where they are in it."""

    def __init__(self, setup: TrainingSetup, counts: TrainingCounts) -> None:
        super().__init__(Transforms(), setup.runs.connection, counts)
        self.epoch: Epoch | None = None  # of the loader that was used last
        self._setup = setup
        self._data: Any = None  # of that loader
        self._saved: Mapping[str, Any] | None = None  # where the next loader continues
        self._loaded: Checkpoint | None = None  # the checkpoint it is from
        self._data_name: str | None = None  # the name passed to `load` for it
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
            self._change(identify(data, name, self._connection))
        if self._saved is None:
            self._counts.batches = 0
        self.transforms.require_equal(self._connection.main, runs.model)
        self._data, epoch = data, Epoch(data, self._setup.runs, self._setup.passes, self._counts)
        if self._saved is not None:
            epoch.load(self._saved, random_state(), self._drop_unfinished)
            self._saved = self._loaded = None
        self.epoch = epoch
        return epoch

    def saved_state(self) -> dict[str, Any]:
        """What a checkpoint has of the data."""
        data: dict[str, Any] = {"position": None, "epoch_random": None}
        if self.epoch is not None:
            data = self.epoch.state()
        finished = self._counts.batches == 0 and (self._counts.epoch > 0 or self.identity is None)
        data["data"] = self.state(finished)
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
        self.identify(data, name)
        return self.compare(checkpoint_, drop_unfinished)

    @override
    def begin(self) -> None:
        """The next loader has new data, to which the position of the checkpoint's data does not apply."""
        super().begin()
        self._data_begin = (self._counts.epoch, self._counts.step)
        self._saved = self._loaded = None

    def _change(self, identity: Identity | None) -> None:
        """The next loader has this data; data before it counts as trained if its loader has ended."""
        before, (epoch, step) = self.identity, self._data_begin
        self.identity = identity
        if before is not None and identity is not None and before.id == identity.id:
            return
        counts, epochs = self._counts, self._counts.epoch - epoch
        if before is not None and not before.grows and epochs > 0 and counts.batches == 0:
            newest = FinishedData(before.id, before.label, counts.step, epochs, counts.step - step)
            self.past = with_newest(self.past, newest)
        self._data_begin = (counts.epoch, counts.step)


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
        runs = make_model_setup(model, precision, device, prefetch)
        self._setup = make_training_setup(
            runs, dense_optimizer, sparse_optimizer, frozen, settings, communication, must_train=True
        )
        self.counts = TrainingCounts()
        self._data = ContextData(self._setup, self.counts)
        self._routine = self._setup.routine
        self._moving = make_placement(runs.model, runs.device, same, [])
        scaled, first = runs.precision.always_checks, runs.connection.rank == 0
        self._outcomes = StepOutcomes(self.counts, scaled, first, nonfinite == "raise")
        self._turn: StepPass | None = None  # the batch that the loader gave, until its forward
        self._pass: StepPass | None = None  # the forward that waits for its backward
        self._step: StepBatches | None = None  # a step of which some batches, but not all, have been trained
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
        self._outcomes.settle()
        return self.counts.skipped

    @property
    def in_step(self) -> bool:
        """Whether a step is in progress: after a forward, until the backward that completes it."""
        return self._pass is not None or self._step is not None

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
        self._turn = self._pass = self._step = None
        self.update.forget()
        if error is None:
            self.dense.take()
            self._saves.finish(self.step)
            self._outcomes.settle()
            if self._setup.passes.together:  # only then do all ranks come to the same result
                self._outcomes.end()

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
        batches = self._batches_of(data, name)
        self._batches = ref(batches)
        return batches

    def _batches_of(self, data: Iterable[Any], name: str | None) -> Generator[Any, None, None]:
        """The batches of an epoch, one after the other, each of which must be trained."""
        epoch = self._data.begin_epoch(data, name)
        trained = True
        try:
            with required_values(data, names_of(self._label)), closing(epoch.groups()) as groups:
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
                self.update.forget()
            if not trained:
                epoch.move_back()

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Compute the model's output for a batch.

        Args:
            batch: A batch of the loader, one made from it, or any other. With several ranks, each brings one;
                they are weighted by their numbers of samples.

        Returns:
            The output, and the labels of the batch.
        """
        self._require("forward")
        if self._pass is not None:
            raise RuntimeError(
                "forward was called twice: expected backward(loss) in between. For outputs without "
                "training, use ctx.eval()."
            )
        if not self.model.training:
            raise RuntimeError("forward trains, but the model is in eval mode: expected train mode.")
        step_pass, batch = self._pass_of(batch)
        if not step_pass.index:
            self.dense.fresh()
        self._routine.forward(step_pass, batch)
        self._pass, self._turn = step_pass, None
        return full(step_pass.output), labels_of(batch, self._label, self.device)

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
        step_pass = self._pass
        if step_pass is None:
            raise RuntimeError(
                "backward was called without a forward: expected output, labels = ctx.forward(batch) before."
            )
        total = self._routine.add_loss(step_pass, loss)
        if not total.requires_grad:
            raise ValueError(
                "The loss depends on nothing that is trained: expected a loss computed from the output "
                "of forward, without detach, item or torch.no_grad."
            )
        self._pass = None
        step = step_pass.step
        self._routine.backward(step_pass)
        if not step_pass.last:
            self._step = step
            return False
        if step.done < len(step.group):
            raise _incomplete(step)
        self._step = None
        applied = self._routine.apply(step)
        self._count(step)
        self._outcomes.add(self.counts.step, applied, [fed.batch for fed in step.group], total.detach())
        return applied if isinstance(applied, Tensor) else bool(applied)

    def _count(self, step: StepBatches) -> None:
        if step.epoch is not None:
            step.epoch.trained(step.group, step.epoch.samples(step.group))
        else:
            Training.started = True
            self.counts.step += 1
            self.counts.samples += sum(fed.all_samples for fed in step.group)

    def eval(self) -> EvalContext:
        """Return a context that evaluates the model as it is now, and changes nothing of training.

        All ranks call it together.

        Returns:
            The context.
        """
        self._require("eval")
        self.dense.settle()
        return EvalContext.of(self._setup.runs, self._data.transforms, self._label)

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
        self._outcomes.settle()
        self.dense.take()
        rank_state = {"metrics": {}, "window": ReportWindow().state_dict()}
        state = {
            **train_state.take_trained(self._setup, self.counts, rank_state),
            **self._data.saved_state(),
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
        self._outcomes.settle()
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


def _incomplete(step: StepBatches) -> RuntimeError:
    return RuntimeError(
        f"Of a step's {len(step.group)} batches {step.done} were trained: expected forward and backward for "
        "each of them."
    )
