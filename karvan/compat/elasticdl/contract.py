"""`ModelContract`: what a model's module defines, found by its name, `--model_def a.b.CustomModel`.

Before it are the constants of ElasticDL and the logger that models write to, after it the callbacks of a
contract: those of ElasticDL, of Karvan, and objects with the methods of Keras's.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from karvan.argument_checks import listed
from karvan.compat.unsupported import UsageError
from karvan.train.callbacks import Callback, TrainerView
from karvan.train.results import FitResult, StepLogs


class Mode:
    """What `feed` prepares records for."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"


class DistributionStrategy:
    """How workers train together."""

    LOCAL = "Local"
    PARAMETER_SERVER = "ParameterServerStrategy"
    ALLREDUCE = "AllreduceStrategy"


class TaskType:
    """What a task is for; those of readers have one of the first three."""

    TRAINING = "TRAINING"
    EVALUATION = "EVALUATION"
    PREDICTION = "PREDICTION"
    NONE = "NONE"
    WAIT = "WAIT"
    TRAIN_END_CALLBACK = "TRAIN_END_CALLBACK"


@dataclass(frozen=True)
class Shard:
    """Records `start` to `end`; `indices` are their numbers in the order to train them, if it is another."""

    name: str
    start: int
    end: int
    indices: list[int] | None = None

    def numbers(self) -> list[int]:
        """The numbers of the records, in the order to train them."""
        return list(range(self.start, self.end)) if self.indices is None else self.indices


# In the environment of workers of --job_command: flags of the job, for data shards without these numbers.
NUM_EPOCHS = "ELASTICDL_NUM_EPOCHS"
MINIBATCHES_PER_TASK = "ELASTICDL_NUM_MINIBATCHES_PER_TASK"


class WorkerEnv:
    """What a worker knows of its job."""

    MASTER_ADDR = "MASTER_ADDR"
    WORKER_ID = "WORKER_ID"
    WORKER_NUM = "WORKER_NUM"


default_logger = logging.getLogger("elasticdl")


def get_logger(
    name: str, level: str | int = "INFO", handlers: list[logging.Handler] | None = None
) -> logging.Logger:
    """A logger of this name and level, with these handlers."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    for handler in handlers or ():
        logger.addHandler(handler)
    return logger


_counts: Counter[str] = Counter()


def table_name(kind: str, name: str | None) -> str:
    """The name that was given, or that of the kind with the number of layers before."""
    if name is not None:
        return name
    number = _counts[kind]
    _counts[kind] += 1
    return f"{kind}_{number}" if number else kind


@contextmanager
def new_model() -> Iterator[None]:
    """Within it numbers begin at 0, so that a model has the same names whenever it is made."""
    before = _counts.copy()
    _counts.clear()
    try:
        yield
    finally:
        _counts.clear()
        _counts.update(before)


class ContractError(UsageError):
    """A model's module, a flag or a folder is not what the contract of ElasticDL expects."""


@dataclass(frozen=True)
class FunctionNames:
    """What the parts of the contract are called in the module, as flags may say."""

    feed: str = "feed"
    loss: str = "loss"
    optimizer: str = "optimizer"
    eval_metrics_fn: str = "eval_metrics_fn"
    callbacks: str = "callbacks"
    custom_data_reader: str = "custom_data_reader"
    prediction_outputs_processor: str = "PredictionOutputsProcessor"


class ModelContract:
    """The parts that a module defines; a part that is missing is an error when it is asked for.

    model_zoo: the folder of modules. model_def: the module and its model, "mnist.mnist_cnn.CustomModel".
    model_params: arguments of the model.
    """

    def __init__(
        self,
        model_zoo: str,
        model_def: str,
        model_params: Mapping[str, Any] | None = None,
        names: FunctionNames | None = None,
    ) -> None:
        self.names = names or FunctionNames()
        module, _, self._model = model_def.rpartition(".")
        if not module:
            raise ContractError(
                f"--model_def expects a module and its model, as mnist.CustomModel, got '{model_def}'."
            )
        self._params = dict(model_params or {})
        self._module = _import(Path(model_zoo), module)
        self._parts = vars(self._module)

    def make_model(self) -> nn.Module:
        """The model: an object of a class, or what a function gives."""
        make = self._required(self._model, "the model that --model_def names")
        with new_model():
            model = make(**self._params)
        if not isinstance(model, nn.Module):
            raise ContractError(
                f"{self._model} of {self._module.__name__} must be a class or a function that gives a "
                f"torch.nn.Module, got {type(model).__name__}. Models of TensorFlow cannot be trained here."
            )
        return model

    @property
    def feed(self) -> tuple[Callable[..., Any], bool]:
        """The function that prepares records, and whether it is the `dataset_fn` of the PyTorch design."""
        if self.names.feed in self._parts:
            return self._parts[self.names.feed], self.names.feed == "dataset_fn"
        if "dataset_fn" in self._parts and self.names.feed == "feed":
            return self._parts["dataset_fn"], True
        return self._required(self.names.feed, "a function feed(records, mode, metadata)"), False

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        """The loss of (labels, predictions); one that names its arguments the other way round is turned."""
        loss: Callable[[Any, Any], Any] = self._required(
            self.names.loss, "a function loss(labels, predictions)"
        )
        arguments = [parameter.lower() for parameter in inspect.signature(loss).parameters]
        if len(arguments) >= 2 and "label" in arguments[1] and "label" not in arguments[0]:
            return lambda labels, predictions: loss(predictions, labels)
        return loss

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model, of any form: optimizer(lr), (model, lr), (parameters, lr), or a maker."""
        factory = self._required(self.names.optimizer, "a function optimizer(model, lr=…)")
        required = [
            parameter
            for parameter in inspect.signature(factory).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        first = required[0].name if required else ""
        if first in ("model", "net", "module"):
            optimizer = factory(model)
        elif first in ("parameters", "params"):
            optimizer = factory(model.parameters())
        elif any(parameter.default is parameter.empty for parameter in required):
            raise ContractError(
                f"{self.names.optimizer} expects optimizer(model, lr=…), optimizer(parameters, lr=…) or "
                f"optimizer(lr=…), got {self.names.optimizer}{inspect.signature(factory)}."
            )
        else:
            optimizer = factory()
        if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
            optimizer = optimizer(model.parameters())  # such as functools.partial(torch.optim.SGD, lr=lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ContractError(
                f"{self.names.optimizer} must give a torch optimizer, or a function that makes one of "
                f"parameters, got {type(optimizer).__name__}."
            )
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if trained - {id(parameter) for parameter in model.parameters()}:
            raise ContractError(
                f"{self.names.optimizer} gave an optimizer of another model's parameters: take the model as "
                f"its first argument, {self.names.optimizer}(model, lr=…)."
            )
        return optimizer

    def eval_metrics(self) -> dict[str, Any]:
        """Metrics by name; those of a model with several outputs are named "output/metric"."""
        make = self._parts.get(self.names.eval_metrics_fn)
        metrics: dict[str, Any] = {}
        for name, metric in (make() if make else {}).items():
            if isinstance(metric, Mapping):
                metrics |= {f"{name}/{inner}": (name, function) for inner, function in metric.items()}
            else:
                metrics[name] = (None, metric)
        return metrics

    def callbacks(self) -> list[Any]:
        """What `callbacks()` gives."""
        make = self._parts.get(self.names.callbacks)
        return list(make()) if make else []

    def prediction_outputs_processor(self) -> Any:
        """An object of the class of that name, or None."""
        make = self._parts.get(self.names.prediction_outputs_processor)
        return make() if make else None

    @property
    def custom_data_reader(self) -> Callable[..., Any] | None:
        """The function that makes the reader of data, if there is one."""
        reader: Callable[..., Any] | None = self._parts.get(self.names.custom_data_reader)
        return reader

    def _required(self, name: str, what: str) -> Any:
        if name not in self._parts:
            public = [part for part in self._parts if not part.startswith("_")]
            raise ContractError(
                f"The module {self._module.__name__} must define {what}, but has no '{name}'. It has: "
                f"{listed(name, public)}"
            )
        return self._parts[name]


def _import(zoo: Path, module: str) -> Any:
    if not zoo.is_dir():
        raise ContractError(f"--model_zoo expects a folder of models, but '{zoo}' is none.")
    file = zoo.joinpath(*module.split(".")).with_suffix(".py")
    if not file.is_file():
        raise ContractError(f"--model_def names the module '{module}', but there is no file {file}.")
    folder = str(zoo.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if (loaded := sys.modules.get(module)) is not None and Path(loaded.__file__ or "") != file.resolve():
        for name in [other for other in sys.modules if other.split(".")[0] == module.split(".")[0]]:
            del sys.modules[name]  # of another model zoo
    importlib.invalidate_caches()
    return importlib.import_module(module)


class BasePredictionOutputsProcessor(ABC):
    """What `predict` calls with the predictions of every batch."""

    @abstractmethod
    def process(self, predictions: Any, worker_id: int) -> None:
        """Take predictions, a tensor or several by name, on the CPU."""


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
