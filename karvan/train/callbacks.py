"""Callbacks, which a [`Trainer`][karvan.Trainer] calls at defined points of a fit.

| moment | when |
|---|---|
| `on_new_data(trainer)` | the data is not that of the fits before; earlier than on_fit_begin |
| `on_fit_begin(trainer)` | once, after a checkpoint was loaded if there was one |
| `on_epoch_begin(trainer, epoch)` | before an epoch's first batch; not again when one is resumed |
| `on_step_end(trainer, logs)` | after every optimizer step, taken or skipped; `trainer.step` counts it |
| `on_evaluate_end(trainer, metrics)` | after every evaluation of a fit; the model is back in training |
| `on_checkpoint(trainer, step)` | when a checkpoint's state was captured; it may not be written yet |
| `on_epoch_end(trainer, epoch)` | after an epoch's last step and the evaluation that follows it |
| `on_fit_end(trainer, result)` | once, unless there was an error; the last checkpoint is written |

A callback with `state_dict` and `load_state_dict` is saved in every checkpoint. `trainer.stop(reason)` ends
the fit after the current step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from karvan.argument_checks import publish
from karvan.dense.steps import LocalDense
from karvan.distributed import Connection
from karvan.train.results import FitResult, StepLogs
from karvan.train.types import Loss, MetricLike, Prediction

_log = logging.getLogger("karvan.train")

__all__ = ["EarlyStopping", "EMA", "Callback", "TrainerView"]


class TrainerView(Protocol):
    """What a callback may use of the Trainer that calls it; for type annotations.

    Every [`Trainer`][karvan.Trainer] has these members. `dense.staleness` says how stale the gradients of
    dense parameters on servers were.

    Example:
        >>> class Note(kv.callbacks.Callback):
        ...     def on_epoch_end(self, trainer: kv.callbacks.TrainerView, epoch: int):
        ...         print(epoch, trainer.step)
    """

    model: nn.Module
    device: torch.device
    connection: Connection
    loss: Loss
    metrics: dict[str, MetricLike]
    dense: LocalDense

    @property
    def step(self) -> int:
        """The number of optimizer steps so far, skipped ones included."""

    @property
    def epoch(self) -> int:
        """The number of complete epochs of this data, which is also the index of the current one."""

    @property
    def history(self) -> Any:
        """All reports of the run as a pandas DataFrame."""

    @property
    def stopping(self) -> str | None:
        """Why the fit is about to stop, or None."""

    def stop(self, reason: str, *, final: bool = False) -> None:
        """End the fit after the current step.

        Args:
            reason: A text for the result's `stopped`.
            final: Whether this data is trained enough.
        """

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Compute the losses and metrics of the model on data.

        Args:
            data: Any iterable of batches, with labels.

        Returns:
            The mean of each loss, and each metric, by name.
        """

    def predict(self, data: Iterable[Any], columns: Sequence[str] = ()) -> Iterator[Prediction]:
        """Yield the model's output for each batch.

        Args:
            data: Any iterable of batches.
            columns: Names of columns of the batch to return beside the output.

        Returns:
            An iterator with a prediction for each batch.
        """


class Callback:
    """The base class of callbacks: it does nothing at any moment.

    Override the moments you need.

    The class attribute `needed_metrics` names metrics that the callback needs from evaluations. A fit that
    does not compute them is an error when it starts, and so is an evaluation in which one is NaN.

    Example:
        >>> class Halfway(kv.callbacks.Callback):
        ...     def on_epoch_end(self, trainer, epoch):
        ...         if trainer.step >= 100:
        ...             trainer.stop("100 steps are enough")
        >>> callback = Halfway()  # for kv.Trainer(..., callbacks=[callback])
    """

    needed_metrics: Sequence[str] = ()

    def on_new_data(self, trainer: TrainerView) -> None:
        """Called if the data is not that of the fits before.

        Args:
            trainer: The Trainer that calls it.
        """

    def on_fit_begin(self, trainer: TrainerView) -> None:
        """Called when training starts or resumes.

        Args:
            trainer: The Trainer that calls it.
        """

    def on_epoch_begin(self, trainer: TrainerView, epoch: int) -> None:
        """Called when an epoch begins.

        Args:
            trainer: The Trainer that calls it.
            epoch: The index of the epoch, from 0.
        """

    def on_step_end(self, trainer: TrainerView, logs: StepLogs) -> None:
        """Called after every optimizer step.

        Args:
            trainer: The Trainer that calls it.
            logs: The step and its losses.
        """

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Called after every evaluation of a fit.

        Args:
            trainer: The Trainer that calls it.
            metrics: The losses and metrics of the evaluation.
        """

    def on_checkpoint(self, trainer: TrainerView, step: int) -> None:
        """Called when the state of a step goes into a checkpoint.

        Args:
            trainer: The Trainer that calls it.
            step: The step of the checkpoint.
        """

    def on_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        """Called when an epoch is over.

        Args:
            trainer: The Trainer that calls it.
            epoch: The index of the epoch, from 0.
        """

    def on_fit_end(self, trainer: TrainerView, result: FitResult) -> None:
        """Called when training is over.

        Args:
            trainer: The Trainer that calls it.
            result: The result of the fit.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints.

        Returns:
            A tree of dicts, lists, numbers, strings and tensors.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The state of a checkpoint.
        """


class EarlyStopping(Callback):
    """Stop a fit when a metric has not improved for some evaluations.

    New data starts without a best value, because it may be harder than the data before.

    Args:
        metric: The name of the metric or loss.
        patience: After how many evaluations without an improvement the fit stops.
        mode: "max" if larger is better, "min" if smaller is.
        min_delta: By how much a value must be better to count as an improvement.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> stopping = kv.callbacks.EarlyStopping("auc", patience=3)
        >>> stopping.needed_metrics
        ('auc',)
    """

    def __init__(self, metric: str, patience: int = 1, mode: str = "max", min_delta: float = 0.0) -> None:
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}.")
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}.")
        if min_delta < 0:
            raise ValueError(f"min_delta must not be negative, got {min_delta}.")
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.needed_metrics = (metric,)
        self.best = math.nan
        self.waited = 0

    def on_new_data(self, trainer: TrainerView) -> None:
        """Forget the best value, which says nothing about this data."""
        self.best, self.waited = math.nan, 0

    def on_fit_begin(self, trainer: TrainerView) -> None:
        """Stop again if an earlier fit was stopped."""
        self._stop_if_due(trainer)

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Compare with the best value so far."""
        if self.metric not in metrics:
            raise KeyError(f"EarlyStopping needs '{self.metric}', but there are: {', '.join(metrics)}.")
        value = metrics[self.metric]
        gain = value - self.best if self.mode == "max" else self.best - value
        if gain > self.min_delta or (math.isnan(self.best) and not math.isnan(value)):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: TrainerView) -> None:
        if self.waited >= self.patience:
            trainer.stop(
                f"early: {self.metric} was best at {self.best:.6g}, {self.waited} evaluations ago", final=True
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and how long it is ago."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.waited = state["best"], state["waited"]


class EMA(Callback):
    """Evaluate and predict with exponential moving averages of the dense parameters.

    After each step, average = decay · average + (1 - decay) · parameter; the first step sets it to the
    parameter. Rows and buffers are used as they are. The averages are in every checkpoint. Evaluations of a
    fit, `Trainer.evaluate` and `Trainer.predict` use them, also after `Trainer.load`. The model keeps its own
    parameters until you call `copy_to`.

    Args:
        decay: How slowly the averages follow the parameters, from 0 to below 1.

    Raises:
        ValueError: `decay` is out of range.

    Example:
        >>> average = kv.callbacks.EMA(decay=0.99)
        >>> average.decay
        0.99
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}.")
        self.decay = decay
        self._averages: dict[str, Tensor] = {}
        self._begun: bool | Tensor = False  # whether a step was taken; a GPU knows it, and nobody waits

    def on_fit_begin(self, trainer: TrainerView) -> None:
        """Refuse mode async, in which servers hold the parameters."""
        if trainer.connection.settings.mode.dense_on_servers:
            raise ValueError(
                "EMA averages the dense parameters of every step, but in mode async servers hold them: "
                "expected mode sync or hybrid, or no EMA."
            )

    def on_step_end(self, trainer: TrainerView, logs: StepLogs) -> None:
        """Follow the parameters, unless the step was skipped."""
        share = logs.taken * (1 - self._begun * self.decay)  # of the parameter
        self._begun = self._begun | logs.taken
        for name, parameter in _trained(trainer.model):
            average, value = self._averages.get(name), parameter.detach()
            if average is None:
                self._averages[name] = value.clone()
                continue
            if average.device != value.device:
                self._averages[name] = average = average.to(value.device)
            average.lerp_(value, share)

    @contextmanager
    def averaged(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which a model has the averages in place of its parameters.

        Args:
            model: The model of the Trainer.

        Yields:
            Nothing.
        """
        averaged = self._averaged_parameters(model)
        values = [parameter.data for parameter, _ in averaged]
        for parameter, average in averaged:
            parameter.data = average.to(parameter.device)
        try:
            yield
        finally:
            for (parameter, _), value in zip(averaged, values, strict=True):
                parameter.data = value

    def _averaged_parameters(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        return [(part, self._averages[name]) for name, part in _trained(model) if name in self._averages]

    def copy_to(self, model: nn.Module) -> None:
        """Replace the parameters of a model by the averages, for programs that use the model without the
        Trainer.

        Args:
            model: The model of the Trainer.
        """
        for parameter, average in self._averaged_parameters(model):
            parameter.data.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return dict(self._averages) if self._begun else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._averages = {name: average.clone() for name, average in state.items()}
        self._begun = bool(state)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    ]


def _each(moment: str) -> Callable[..., None]:
    """A method that calls the one of this name of every callback."""

    def call(self: Callbacks, *arguments: Any) -> None:
        for callback in self._callbacks.values():
            getattr(callback, moment)(*arguments)

    return call


class Callbacks(Callback):
    """Several callbacks as one, called in their order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks: dict[str, Callback] = {}
        for callback in callbacks:
            if not isinstance(callback, Callback):
                name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
                raise TypeError(f'callbacks must be Callbacks, such as EarlyStopping("auc"), got {name}.')
            kind = type(callback).__name__
            same = sum(type(other).__name__ == kind for other in self._callbacks.values())
            self._callbacks[f"{kind}-{same + 1}" if same else kind] = callback

        if len(self.averages) > 1:
            raise ValueError(f"callbacks expects at most one EMA, got {len(self.averages)}.")

    @property
    def averages(self) -> dict[str, EMA]:
        """The averages of parameters with which models are evaluated, by name."""
        return {name: callback for name, callback in self._callbacks.items() if isinstance(callback, EMA)}

    def averaged(self, model: nn.Module) -> AbstractContextManager[None]:
        """The context in which a model is evaluated."""
        return next((average.averaged(model) for average in self.averages.values()), nullcontext())

    def load_averages(self, state: Mapping[str, Any]) -> None:
        """Restore averages of parameters from the state of a checkpoint."""
        for name, average in self.averages.items():
            average.load_state_dict(state.get("callbacks", {}).get(name, {}))

    @property
    def needs(self) -> dict[str, Sequence[str]]:
        """The metrics that callbacks need, by the callbacks' names."""
        return {
            name: callback.needed_metrics
            for name, callback in self._callbacks.items()
            if callback.needed_metrics
        }

    on_new_data = _each("on_new_data")
    on_fit_begin = _each("on_fit_begin")
    on_epoch_begin = _each("on_epoch_begin")
    on_step_end = _each("on_step_end")
    on_evaluate_end = _each("on_evaluate_end")
    on_checkpoint = _each("on_checkpoint")
    on_epoch_end = _each("on_epoch_end")
    on_fit_end = _each("on_fit_end")

    def state_dict(self) -> dict[str, Any]:
        """By the names of their classes, numbered where there are several of one."""
        return {name: callback.state_dict() for name, callback in self._callbacks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore each callback that has saved state; state of absent callbacks is ignored."""
        for name, callback in self._callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])
        if unused := sorted(set(state) - set(self._callbacks)):
            _log.warning("State in the checkpoint of absent callbacks is ignored: %s.", ", ".join(unused))


publish("karvan.train.callbacks")
