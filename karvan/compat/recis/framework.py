"""`Trainer` and `TrainingArguments`: RecIS's training loop as a `kv.Trainer`, and the program within it.

Karvan's Trainer calls a model with batches of its own kind, and RecIS's models take samples with
RaggedTensors and return their loss. Hooks of the module translate; calls with anything else pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from karvan.checkpoint import Checkpoints
from karvan.compat.recis.hooks import (
    Hook,
    HookCalls,
    LoggerHook,
    MetricReportHook,
    ReportArguments,
    TrainerOption,
)
from karvan.compat.recis.io import DatasetBase
from karvan.compat.recis.metrics import evaluated_metrics, get_log_metrics, restore_metrics
from karvan.compat.recis.nn import connect_ranks
from karvan.compat.recis.ragged import to_karvan, to_recis
from karvan.compat.recis.serialize import load_bank
from karvan.compat.unsupported import UnsupportedError, refuse_methods, require_default, require_defaults
from karvan.data import Loader, merge
from karvan.embedding.optim import SparseOptimizer
from karvan.ragged import Batch
from karvan.train import Trainer as KarvanTrainer

__all__ = ["Trainer", "TrainingArguments"]


class ProgramData:
    """A dataset of a program: its batches for Karvan, and those batches for the program."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.batches: Iterable[Any] = (
            dataset.loader if isinstance(dataset, DatasetBase) else _Anew(lambda: _batches_of(dataset))
        )

    def present(self, batch: Mapping[str, Any]) -> Any:
        """A batch as the program knows it."""
        if isinstance(self._dataset, DatasetBase):
            return self._dataset.present(batch)
        return {name: to_recis(entry) for name, entry in batch.items()}

    def first(self, count: int | None) -> Iterable[Any]:
        """The first batches, or all of them."""
        if isinstance(self._dataset, DatasetBase):
            self._dataset.reset()
        return self.batches if count is None else _Anew(lambda: islice(self.batches, count))

    def short_epochs(self, count: int) -> Iterable[Any]:
        """The first batches in each epoch; of a dataset of RecIS's with their position."""
        loader = self.batches
        return ShortEpochs(loader, count) if isinstance(loader, Loader) else self.first(count)


def _batches_of(dataset: Any) -> Iterator[Batch]:
    """The batches of a dataset whose items are `(is_end, samples)`."""
    for is_end, samples in dataset:
        if is_end:
            getattr(dataset, "reset", lambda: None)()  # for the next epoch, as RecIS does
            return
        yield Batch({name: to_karvan(entry) for name, entry in samples.items()})


class _Anew:
    """Each iteration is over what a function gives."""

    def __init__(self, iterate: Callable[[], Iterator[Any]]) -> None:
        self._iterate = iterate

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()


class ShortEpochs:
    """The first batches of a loader in each epoch; their position is the loader's, with the epoch's count."""

    def __init__(self, loader: Loader, count: int) -> None:
        self._loader, self._count = loader, count
        self._epoch = self._taken = 0
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            self.start_epoch(self._epoch + 1)
        for batch in islice(self._loader, self._count - self._taken):
            self._taken += 1
            yield batch
        self._ended = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def start_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch."""
        self._loader.start_epoch(epoch)
        self._epoch, self._taken, self._ended = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {**self._loader.state_dict(), "short": [self._epoch, self._taken]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position, also to one of the loader itself, which is at the start of an epoch."""
        self._loader.load_state_dict(state)
        self._epoch, self._taken = state.get("short", [self._loader.epoch, 0])
        self._ended = False

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The positions of all ranks as one."""
        return {**merge(states), "short": max(state["short"] for state in states)}


class ProgramModel:
    """Translates the calls of a model while it is computed with the data of a program."""

    def __init__(self, model: nn.Module, calls: HookCalls) -> None:
        self._model = model
        self._calls = calls
        self._batch: Batch | None = None
        self._data: ProgramData | None = None
        self._metrics: dict[str, Any] = {}  # before a batch without samples
        self.evaluates_loss = True  # whether it returns its loss in evaluations, too

    @contextmanager
    def computing(self, data: ProgramData) -> Iterator[None]:
        """Within it, batches of this data reach the model as samples."""
        self._data = data
        before = self._model.register_forward_pre_hook(self._before)
        after = self._model.register_forward_hook(self._after)
        try:
            with before, after:  # which are removed at its end
                yield
        finally:
            self._data = None

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._batch = args[0] if args and isinstance(args[0], Batch) else None
        if self._batch is None or self._data is None:
            return None
        samples = self._data.present(self._batch)
        if module.training:
            self._calls.end_trained_batch()
        if self._batch.samples:
            self._calls.begin_batch(samples, module.training)
        else:
            self._metrics = dict(get_log_metrics())
        return (samples,)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        batch, self._batch = self._batch, None
        if batch is None:
            return output
        if not batch.samples:
            restore_metrics(self._metrics)
        is_loss = isinstance(output, Tensor) and output.numel() == 1
        if not module.training:
            self.evaluates_loss = is_loss
            if batch.samples:
                self._calls.end_evaluated_batch(output)
            return torch.nan_to_num(output) if is_loss and not batch.samples else output
        if not is_loss:
            got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"A model of RecIS returns its loss in training: expected a tensor of one number, got {got}."
            )
        self._calls.end_training(output.detach() if batch.samples else None)
        # A rank whose data has ended computes batches without samples for the others: their mean is NaN.
        return output if batch.samples else torch.nan_to_num(output)


def model_loss(output: Any, batch: Any) -> Tensor:
    """The loss that the model has returned; 0 if an evaluation has returned something else."""
    return output if isinstance(output, Tensor) and output.numel() == 1 else torch.zeros(())


_WINDOWS = "train on windows by kv.data.Windows and one fit for each."
_SAVED = "Karvan saves every save_steps steps and at the end."
_BANK = "load other checkpoints by model_bank before training."
_REFUSED = {
    **dict.fromkeys(("save_every_n_windows", "load_update_windows", "window_iter"), _WINDOWS),
    **dict.fromkeys(("save_every_n_epochs", "save_end"), _SAVED),
    **dict.fromkeys(("load_update_steps", "load_update_epochs"), _BANK),
    **dict.fromkeys(("params_not_save", "save_filter_fn"), "a checkpoint has the whole model."),
    "saver_option": "give output_dir and max_to_keep.",
    "ckpt_save_arg": "give save_steps.",
    "ckpt_load_arg": "a fit continues from its newest checkpoint.",
    "eval_mos_report_uri": "use kv.loggers.",
    "prefetch": "batches are always prepared in advance.",
}


@dataclass
class TrainingArguments:
    """Settings of a Trainer.

    Steps are batches, as in RecIS. train_steps limits those of each epoch, and all of them are made; a single
    epoch that is limited can be continued by a larger limit. With gradient_accumulation_steps save_steps, and
    train_steps of a single epoch, are rounded up to whole steps of the optimizers. A run that is started
    again with the same output_dir continues.
    """

    gradient_accumulation_steps: int = 1
    output_dir: str = "output_dir"
    model_bank: Sequence[Any] | None = None
    log_steps: int = 100
    train_steps: int | None = None
    train_epoch: int | None = 1
    eval_steps: int | None = None
    save_steps: int | None = 1000
    max_to_keep: int = 5
    save_concurrency_per_rank: int = 4
    save_every_n_windows: int = 1
    save_every_n_epochs: int | None = None
    save_end: bool | None = True
    load_update_steps: int | None = None
    load_update_windows: int | None = 1
    load_update_epochs: int | None = None
    params_not_save: Sequence[str] | None = None
    save_filter_fn: Any = None
    saver_option: Any = None
    ckpt_save_arg: Any = None
    ckpt_load_arg: Any = None
    mixed_precision: str | None = None
    window_iter: int | None = None
    eval_mos_report_uri: str | None = None
    prefetch: Any = None

    def __post_init__(self) -> None:
        require_defaults(TrainingArguments, self, _REFUSED)
        for name in ("gradient_accumulation_steps", "train_epoch", "train_steps", "save_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"TrainingArguments expects {name} of at least 1, got {value}.")
        if self.mixed_precision not in (None, "bf16", "fp16"):
            raise ValueError(f"mixed_precision expects 'bf16' or 'fp16', got {self.mixed_precision!r}.")

    def optimizer_steps(self, batches: int | None) -> int | None:
        """How many steps of optimizers so many batches make, rounded up."""
        return None if batches is None else -(-batches // self.gradient_accumulation_steps)


_LOOPS = (
    *("_train_step", "_train_loop", "_train_loop_internal", "_train_loop_by_window"),
    *("_eval_loop", "_eval_loop_internal", "_eval_loop_by_window"),
    *("_train_eval_loop", "_train_eval_loop_by_window"),
    *("get_new_window_iter", "sync_exit_flag", "init_hooks"),
)
_SAVERS = ("build_saver", "init_saver", "build_checkpoint_manager", "restore")
_SAVES = "give TrainingArguments output_dir, save_steps, max_to_keep and model_bank."
_COMPUTES = "compute the loss in the model's forward, use hooks, or write a loop by kv.TrainContext."
_METHODS = {**dict.fromkeys(_LOOPS, _COMPUTES), **dict.fromkeys(_SAVERS, _SAVES)}
_ATTRIBUTES = {
    **_METHODS,
    **dict.fromkeys(("saver", "checkpoint_manager"), _SAVES),
    "accelerator": "the Trainer already has the model, the optimizers and the data.",
}


class Trainer:
    """Trains a model that returns its loss. `karvan_trainer` is the `kv.Trainer` that does it.

    Batches always go where the model is, so data_to_cuda changes nothing. Nor do ddp_bucket_cap_mb,
    ddp_static_graph and ddp_gradient_as_bucket_view, which are about speed and memory.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        hooks: Iterable[Hook] | None = None,
        dense_optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        sparse_optimizer: SparseOptimizer | None = None,
        data_to_cuda: bool = False,
        ddp_find_unused_parameters: bool = True,
        ddp_broadcast_buffers: bool = True,
        saver: Any = None,
        ddp_gradient_as_bucket_view: bool = False,
        ddp_bucket_cap_mb: int = 25,
        ddp_static_graph: bool = False,
        *,
        monitor_report_args: ReportArguments | None = None,
        **kwargs: Any,
    ) -> None:
        require_default("Trainer ddp_broadcast_buffers", ddp_broadcast_buffers, True, "leave it out.")
        for name, value in kwargs.items():
            in_arguments = name == "mixed_precision"
            instead = f"give TrainingArguments {name}." if in_arguments else "leave it out."
            raise UnsupportedError(f"Trainer {name}={value!r}", instead)
        require_default("Trainer saver", saver, None, "give TrainingArguments output_dir and save_steps.")
        connect_ranks()
        self.args = args = args or TrainingArguments()
        self.model = model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.dense_optimizer, self.dense_lr_scheduler = dense_optimizers
        self.sparse_optimizer = sparse_optimizer
        self.gradient_accumulation_steps = args.gradient_accumulation_steps
        self.data_to_cuda = data_to_cuda
        get_log_metrics().clear()  # of a Trainer before
        self._calls = HookCalls()
        self._program = ProgramModel(model, self._calls)
        optimizer = self.dense_optimizer
        options: dict[str, Any] = {}
        reports = [] if monitor_report_args is None else [MetricReportHook(model, monitor_report_args)]
        for hook in (*(hooks or ()), *reports, LoggerHook(args.log_steps)):
            self._calls.add(hook)
            if isinstance(hook, TrainerOption):
                options |= hook.options(optimizer)
        self.karvan_trainer = KarvanTrainer(
            model,
            model_loss,
            dense_optimizer=optimizer,
            sparse_optimizer=sparse_optimizer,
            scheduler=self.dense_lr_scheduler,
            precision=args.mixed_precision or "fp32",
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            find_unused_parameters=ddp_find_unused_parameters,
            callbacks=[self._calls],
            progress="none",
            checkpoints=Checkpoints(
                args.output_dir, keep_last=args.max_to_keep, writers=args.save_concurrency_per_rank
            ),
            checkpoint_every=args.optimizer_steps(args.save_steps),
            checkpoint_seconds=None,
            **options,
        )

    @property
    def hooks(self) -> list[Hook]:
        """All hooks, with the Trainer's own LoggerHook."""
        return self._calls.hooks

    def add_hook(self, hook: Hook) -> None:
        """Add a hook; those that set options of training are given when the Trainer is made."""
        if isinstance(hook, TrainerOption):
            raise UnsupportedError(
                f"add_hook of a {type(hook).__name__}", "give it to the Trainer when it is made: hooks=[…]."
            )
        self._calls.add(hook)

    def add_hooks(self, hooks: Iterable[Hook]) -> None:
        """Add hooks."""
        for hook in hooks:
            self.add_hook(hook)

    def train(self, train_steps: int | None = None) -> None:
        """Train: from the newest checkpoint of output_dir, or from the model_bank if there is none."""
        self._calls.call("start", is_train=True)
        data, batches, most = self._limited(train_steps, self.args.train_epoch or 1)
        self._fit(data, batches, self.args.train_epoch or 1, most)
        self._calls.call("end", is_train=True)

    def _limited(self, train_steps: int | None, epochs: int) -> tuple[ProgramData, Iterable[Any], int | None]:
        """The training data, its batches in an epoch, and the most steps of a single epoch."""
        data = _data_of("train_dataset", self.train_dataset)
        count = self.args.train_steps if train_steps is None else train_steps
        if count is None or epochs == 1:
            return data, data.batches, self.args.optimizer_steps(count)
        return data, data.short_epochs(count), None

    def _fit(self, data: ProgramData, batches: Iterable[Any], epochs: int, most: int | None) -> None:
        self._load_bank()
        with self._program.computing(data):
            self.karvan_trainer.fit(batches, epochs=epochs, max_steps=most)

    def evaluate(self, eval_steps: int | None = None) -> dict[str, Any]:
        """Compute the batches of eval_dataset, or the first of them.

        Returns the means of the loss and of what the model reports, over the samples of all batches and
        ranks. Metrics that count all batches themselves, as `AUROC` does, have their newest value.
        """
        self._calls.call("start", is_train=False)
        metrics = self._evaluate(eval_steps)
        self._calls.call("end", is_train=False)
        return metrics

    def _evaluate(self, eval_steps: int | None) -> dict[str, Any]:
        trainer = self.karvan_trainer
        if trainer.step == 0 and trainer.saver.latest() is not None:
            batches = trainer.load().step * self.args.gradient_accumulation_steps
            self._calls.load_state_dict({"global_step": batches})
        else:
            self._load_bank()
        data = _data_of("eval_dataset", self.eval_dataset)
        most = self.args.eval_steps if eval_steps is None else eval_steps
        get_log_metrics().clear()  # of training
        self._calls.call("before_epoch", is_train=False)
        with self._program.computing(data):
            means = trainer.evaluate(data.first(most))
        if not self._program.evaluates_loss:
            del means["loss"]
        self._calls.call("out_off_data")
        self._calls.call("after_eval")
        self._calls.call("after_epoch", is_train=False)
        return evaluated_metrics(means)

    def train_and_evaluate(
        self,
        *args: int,
        epochs: int | None = None,
        train_steps: int | None = None,
        eval_steps: int | None = None,
    ) -> None:
        """Train, and evaluate after each epoch; epochs: instead of TrainingArguments' train_epoch."""
        if args:
            raise UnsupportedError(
                f"train_and_evaluate({', '.join(map(str, args))})",
                "its first argument means epochs in RecIS 1.0 and train_steps in later versions: name it.",
            )
        epochs = epochs or self.args.train_epoch or 1
        self._calls.call("start", is_train=True)
        data, batches, most = self._limited(train_steps, epochs)
        for epoch in range(epochs):
            self._fit(data, batches, epoch + 1, most)
            self._evaluate(eval_steps)
        self._calls.call("end", is_train=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_methods(cls, _METHODS)

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            raise UnsupportedError(f"recis.framework.Trainer.{name}", _ATTRIBUTES[name])
        raise AttributeError(f"module 'recis.framework.Trainer' has no attribute '{name}'")

    def _load_bank(self) -> None:
        trainer = self.karvan_trainer
        if self.args.model_bank and trainer.step == 0 and trainer.saver.latest() is None:
            load_bank(self.model, self.args.model_bank, trainer.update.sparse)


def _data_of(name: str, dataset: Any) -> ProgramData:
    if dataset is None:
        raise ValueError(f"The Trainer expects a {name}, got None.")
    return ProgramData(dataset)
