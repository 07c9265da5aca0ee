"""Hooks of a Trainer: what it calls at certain moments; some stand for options of a `kv.Trainer`.

Hooks of RecIS 1.0 are called `after_step(metrics, global_step)` and `end()`, those of later versions with
keywords. The signature of a hook's method says which it is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile, schedule, tensorboard_trace_handler
from typing_extensions import override

from karvan.compat.recis.metrics import add_metric, get_log_metrics
from karvan.compat.recis.nn import filtered
from karvan.compat.recis.utils import Logger
from karvan.compat.unsupported import UnsupportedError, require_default, require_defaults
from karvan.train.callbacks import Callback, TrainerView
from karvan.train.results import FitResult, StepLogs

__all__ = [
    "ClipGradNormHook",
    "HashTableFilterHook",
    "Hook",
    "LoggerHook",
    "MetricReportHook",
    "ProfilerHook",
]


class Hook:
    """Does nothing at any moment; override those you need.

    | moment | when |
    |---|---|
    | `start`, `end` | around a call of train or evaluate |
    | `before_epoch`, `after_epoch` | around an epoch, or an evaluation |
    | `before_step`, `after_data` | before a forward; after_data has the batch as `data` |
    | `after_step` | after a step, with `metrics`, `global_step` and, of an evaluation, `eval_result` |
    | `out_off_data` | the data of an epoch has ended |
    | `after_train`, `after_eval` | after the steps of an epoch, or of an evaluation |
    """

    def start(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """Training or an evaluation starts."""

    def end(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """It is over."""

    def before_epoch(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """An epoch begins."""

    def after_epoch(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """An epoch is over."""

    def before_step(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """A batch is about to be computed."""

    def after_data(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """A batch is there."""

    def after_step(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """A step is over."""

    def out_off_data(self, *args: Any, **options: Any) -> None:
        """There is no more data."""

    def after_train(self, *args: Any, **options: Any) -> None:
        """The steps of an epoch are over."""

    def after_eval(self, *args: Any, **options: Any) -> None:
        """The steps of an evaluation are over."""


class TrainerOption(Hook, ABC):
    """A hook that does nothing by itself: it must be among the hooks that a Trainer is made with."""

    @abstractmethod
    def options(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """The options, given the optimizer of parameters."""


class ClipGradNormHook(TrainerOption):
    """Limits the L2 norm of the gradients of all parameters, once for each step.

    dense_params are those of the dense optimizer. sparse_params is refused unless it is empty. With
    error_if_nonfinite gradients that are not finite raise a FloatingPointError; without it they are dropped,
    as those of every step.
    """

    def __init__(
        self,
        dense_params: Tensor | Iterable[Tensor],
        sparse_params: Iterable[Any] | None,
        max_norm: float,
        error_if_nonfinite: bool = False,
    ) -> None:
        if sparse_params is not None and list(sparse_params):
            raise UnsupportedError(
                "ClipGradNormHook(sparse_params=…), one norm of parameters and rows together,",
                "clip the gradient of each row by kv.optim.AdamW(clip_norm=…).",
            )
        self.dense_params = [dense_params] if isinstance(dense_params, Tensor) else list(dense_params)
        self.max_norm, self.error_if_nonfinite = float(max_norm), error_if_nonfinite

    @override
    def options(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        groups = [] if optimizer is None else optimizer.param_groups
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        if {id(parameter) for parameter in self.dense_params} != trained:
            raise UnsupportedError(
                f"ClipGradNormHook for {len(self.dense_params)} parameters beside a dense optimizer of "
                f"{len(trained)}",
                "expected the same parameters.",
            )
        return {"clip_norm": self.max_norm, "nonfinite": "raise" if self.error_if_nonfinite else "skip"}


class HashTableFilterHook(Hook):
    """Applies the filters of all tables every filter_interval steps; None never does."""

    def __init__(self, filter_interval: int | None = 100) -> None:
        self.reset_filter_interval(filter_interval)
        self._steps = 0

    def reset_filter_interval(self, interval: int | None = 100) -> None:
        """Filter at another interval from now on."""
        if interval is not None and interval < 1:
            raise ValueError(f"HashTableFilterHook expects an interval of at least 1, got {interval}.")
        self.filter_interval = interval

    @override
    def after_step(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        if not is_train or self.filter_interval is None:
            return
        self._steps += 1
        if self._steps % self.filter_interval == 0:
            for handle in sorted(filtered, key=lambda table: table.name):
                handle.evict()


class LoggerHook(Hook):
    """Logs `<gstep=20> <lstep=20> <qps=3.1> <epoch=0> <loss=0.69> <auc=0.51>`; a Trainer has one.

    gstep counts the steps of the run, lstep those of this program, qps is steps a second.
    """

    def __init__(self, log_step: int = 10) -> None:
        if log_step < 1:
            raise ValueError(f"LoggerHook expects log_step of at least 1, got {log_step}.")
        self.log_step = log_step
        self.steps = 0
        self._logger = Logger("Metric")
        self._since = time.monotonic()

    def format_metrics(self, metrics: Mapping[str, Any]) -> str:
        """The numbers as text: epoch and loss first, then the others in their order."""
        first = [name for name in ("epoch", "loss") if name in metrics]
        return "".join(f" <{name}={_text(metrics[name])}>" for name in dict.fromkeys((*first, *metrics)))

    @override
    def after_step(
        self,
        is_train: bool = True,
        *args: Any,
        metrics: Mapping[str, Any] | None = None,
        global_step: int = 0,
        **options: Any,
    ) -> None:
        self.steps += 1
        if self.steps % self.log_step:
            return
        now = time.monotonic()
        speed, self._since = self.log_step / max(now - self._since, 1e-9), now
        numbers = self.format_metrics(metrics or {})
        self._logger.info(f"<gstep={int(global_step)}> <lstep={self.steps}> <qps={speed:.4f}>{numbers}")


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.detach().float().mean().item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_FLOPS = "Karvan counts no operations: use ProfilerHook."


@dataclass
class ReportArguments:
    """interval_step: steps between two reports."""

    interval_step: int = 100
    tflops_peak: float | None = -1
    compute_precision: Any = None
    eval_flops_ratio: float = 1 / 3
    min_peak_coverage: float = 0.99

    def __post_init__(self) -> None:
        if not isinstance(self.interval_step, int) or self.interval_step < 1:
            raise ValueError(
                f"ReportArguments expects interval_step of at least 1, got {self.interval_step}."
            )
        counted = ("tflops_peak", "compute_precision", "eval_flops_ratio", "min_peak_coverage")
        require_defaults(ReportArguments, self, dict.fromkeys(counted, _FLOPS))


class MetricReportHook(TrainerOption):
    """`log_every` of a `kv.Trainer`: samples a second and the rows of tables are in history.jsonl.

    That file is in output_dir; a Trainer writes it without this hook, too. The numbers are
    those of the Trainer's own model and precision.
    """

    def __init__(
        self,
        model: nn.Module,
        report_args: ReportArguments | None = None,
        mixed_precision: str | None = None,
        flops_state: Any = None,
    ) -> None:
        require_default("flops_state", flops_state, None, _FLOPS)
        self.model, self.args = model, report_args or ReportArguments()
        self.mixed_precision = mixed_precision

    @override
    def options(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        return {"log_every": self.args.interval_step}


class ProfilerHook(Hook):
    """Writes traces of `active` steps into a folder, after `wait` and `warmup` steps, `repeat` times."""

    def __init__(
        self, wait: int = 1, warmup: int = 48, active: int = 1, repeat: int = 4, output_dir: str = "./"
    ) -> None:
        self._profile = profile(
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
            on_trace_ready=tensorboard_trace_handler(output_dir),
            record_shapes=True,
            with_stack=True,
        )

    @override
    def start(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        if is_train:
            self._profile.start()

    @override
    def after_step(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        if is_train:
            self._profile.step()

    @override
    def end(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        if is_train:
            self._profile.stop()


_MOMENTS = {
    **dict.fromkeys(("start", "end", "before_epoch", "after_epoch", "before_step"), ("is_train",)),
    "after_data": ("is_train", "data"),
    "after_step": ("is_train", "metrics", "global_step", "eval_result"),
    **dict.fromkeys(("out_off_data", "after_train", "after_eval"), ()),
}
"""What hooks are told at each moment."""

_FIRST_GENERATION = {"after_step": ("metrics", "global_step")}  # in this order


class HookCalls(Callback):
    """All hooks of a Trainer. `global_step` counts the batches that were trained."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.global_step = 0
        self._within_epoch = False
        self._epoch = 0
        self._trained = False  # whether a batch has had its forward, but not its after_step
        self._loss: Tensor | None = None
        self._signatures: dict[Callable[..., Any], Signature] = {}

    def add(self, hook: Hook) -> None:
        """Add a hook."""
        if hasattr(hook, "after_backward"):
            raise UnsupportedError(
                f"after_backward of {type(hook).__name__}",
                "clip gradients by ClipGradNormHook, or gradients of rows by kv.optim.AdamW(clip_norm=…).",
            )
        for moment, names in _MOMENTS.items():
            if (method := getattr(hook, moment, None)) is not None:
                called = self._signature(method)
                args, options = _arguments(called, moment, dict.fromkeys(names))
                try:
                    called.bind(*args, **options)
                except TypeError as error:
                    raise TypeError(
                        f"{moment} of {type(hook).__name__}, which takes {called}, expects arguments among "
                        f"{', '.join(names) or 'none'}: {error}."
                    ) from None
        self.hooks.append(hook)

    def call(self, moment: str, **values: Any) -> None:
        """Call all hooks that know this moment."""
        for hook in self.hooks:
            if (method := getattr(hook, moment, None)) is not None:
                args, options = _arguments(self._signature(method), moment, values)
                method(*args, **options)

    def _signature(self, method: Callable[..., Any]) -> Signature:
        if method not in self._signatures:
            self._signatures[method] = signature(method)
        return self._signatures[method]

    def begin_batch(self, samples: Any, training: bool) -> None:
        """A batch with samples is about to be computed."""
        if training and not self._within_epoch:
            self._within_epoch = True
            self.call("before_epoch", is_train=True)
        self.call("before_step", is_train=training)
        self.call("after_data", is_train=training, data=samples)

    def end_training(self, loss: Tensor | None) -> None:
        """A training batch has been computed; None: it has no samples, as the data of this rank has ended."""
        self._trained, self._loss = True, loss

    def end_evaluated_batch(self, result: Any) -> None:
        """A batch of an evaluation has been computed."""
        self._after_step(is_train=False, eval_result=result)

    def end_trained_batch(self) -> None:
        """Another training batch of the step is about to be computed, or the step ends."""
        if not self._trained:
            return
        self._trained = False
        self.global_step += 1
        add_metric("epoch", self._epoch)
        if self._loss is not None:
            add_metric("loss", self._loss)
        self._after_step(is_train=True)

    def _after_step(self, **values: Any) -> None:
        step = torch.tensor(self.global_step)  # as RecIS has it, for hooks that call item()
        self.call("after_step", metrics=get_log_metrics(), global_step=step, **values)

    @override
    def on_fit_begin(self, trainer: TrainerView) -> None:
        self._epoch = trainer.epoch

    @override
    def on_epoch_begin(self, trainer: TrainerView, epoch: int) -> None:
        self._epoch = epoch

    @override
    def on_step_end(self, trainer: TrainerView, logs: StepLogs) -> None:
        self.end_trained_batch()

    @override
    def on_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        self.call("out_off_data")
        self._end_epoch()

    @override
    def on_fit_end(self, trainer: TrainerView, result: FitResult) -> None:
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._within_epoch:
            self._within_epoch = False
            self.call("after_train")
            self.call("after_epoch", is_train=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.global_step}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checkpoints of earlier versions have no global_step."""
        self.global_step = state.get("global_step", self.global_step)


def _arguments(
    called: Signature, moment: str, values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a hook's method: keywords that it takes, or by position what RecIS 1.0 gives."""
    kinds = {parameter.kind for parameter in called.parameters.values()}
    named = [parameter for parameter in called.parameters.values() if parameter.kind not in _VARIABLE]
    foreign = any(
        parameter.default is Parameter.empty and parameter.name not in values for parameter in named
    )
    if foreign or kinds == {Parameter.VAR_POSITIONAL}:
        return tuple(values[name] for name in _FIRST_GENERATION.get(moment, ())), {}
    if Parameter.VAR_KEYWORD in kinds:
        return (), dict(values)
    return (), {parameter.name: values[parameter.name] for parameter in named if parameter.name in values}


_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
