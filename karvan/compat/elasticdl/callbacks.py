"""Callbacks of a contract: those of ElasticDL, of Karvan, and objects with the methods of Keras's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from karvan.compat.elasticdl.contract import ContractError
from karvan.train.callbacks import Callback, TrainerView
from karvan.train.results import FitResult, StepLogs

_CALLED = (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_train_batch_end"),
    "on_test_end",
)
_NOT_CALLED = (
    *("on_task_end", "on_train_batch_begin", "on_batch_begin", "on_batch_end", "on_test_begin"),
    *("on_test_batch_begin", "on_test_batch_end", "on_predict_begin", "on_predict_end"),
)


@dataclass(frozen=True)
class MaxStepsStopping:
    """Training ends after this number of steps of the job: `max_steps` of `Trainer.fit`."""

    max_steps: int


@dataclass(frozen=True)
class LearningRateScheduler:
    """The learning rate of each step is schedule(step), where steps count those of the job, from 0."""

    schedule: Callable[[int], float]

    def __call__(self, optimizer: Optimizer) -> LambdaLR:
        """The scheduler of an optimizer."""
        base = optimizer.param_groups[0]["lr"]
        if not base:
            raise ContractError(
                "LearningRateScheduler expects an optimizer with a learning rate above 0, got 0."
            )
        return LambdaLR(optimizer, lambda step: self.schedule(step) / base)


class SavedModelExporter:
    """An error: it says what exports models."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise ContractError(
            "SavedModelExporter writes models of TensorFlow: leave it out, and name a folder with "
            "--output. evaluate and predict load the model from there."
        )


@dataclass(frozen=True)
class FitOptions:
    """What the callbacks of a contract mean for a fit."""

    callbacks: list[Callback]
    max_steps: int | None
    schedulers: list[LearningRateScheduler]


def fit_options(callbacks: Iterable[Any]) -> FitOptions:
    """Callbacks by what they are; an object that has none of the methods is an error."""
    converted: list[Callback] = []
    limits: list[int] = []
    schedulers: list[LearningRateScheduler] = []
    for callback in callbacks:
        if isinstance(callback, MaxStepsStopping):
            limits.append(callback.max_steps)
        elif isinstance(callback, LearningRateScheduler):
            schedulers.append(callback)
        elif isinstance(callback, Callback):
            converted.append(callback)
        else:
            converted.append(MethodCallback(callback))
    return FitOptions(converted, min(limits, default=None), schedulers)


class MethodCallback(Callback):
    """Calls the methods that an object has, under Keras's names; it finds the model as `self.model`."""

    def __init__(self, target: Any) -> None:
        for name in _NOT_CALLED:
            if hasattr(target, name):
                raise ContractError(
                    f"The callback {type(target).__name__} has {name}, which is not called here: expected "
                    f"some of {', '.join(_CALLED)}, or a kv.callbacks.Callback."
                )
        if not any(hasattr(target, name) for name in _CALLED):
            raise ContractError(
                f"callbacks() must give objects with some of {', '.join(_CALLED)}, or kv.callbacks.Callback, "
                f"got {type(target).__name__}."
            )
        self._target = target

    def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self._target, name, None)
        if method is not None:
            method(*arguments)

    def on_fit_begin(self, trainer: TrainerView) -> None:
        """`on_train_begin(logs)`."""
        self._target.model = trainer.model.model
        self._call("on_train_begin", {})

    def on_epoch_begin(self, trainer: TrainerView, epoch: int) -> None:
        """`on_epoch_begin(epoch, logs)`."""
        self._call("on_epoch_begin", epoch, {})

    def on_step_end(self, trainer: TrainerView, logs: StepLogs) -> None:
        """`on_train_batch_end(batch, logs)`: batches are numbered by the steps of the job, from 0."""
        if hasattr(self._target, "on_train_batch_end"):
            self._call("on_train_batch_end", trainer.step - 1, {k: float(v) for k, v in logs.losses.items()})

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """`on_test_end(logs)`."""
        self._call("on_test_end", dict(metrics))

    def on_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        """`on_epoch_end(epoch, logs)`."""
        self._call("on_epoch_end", epoch, {})

    def on_fit_end(self, trainer: TrainerView, result: FitResult) -> None:
        """`on_train_end(logs)`."""
        self._call("on_train_end", dict(result.metrics))
