"""`HookCalls`: calls RecIS's hooks from the callbacks of a `kv.Trainer` and from a model's forward.

Hooks of RecIS 1.0 are called `after_step(metrics, global_step)` and `end()`, those of later versions with
keywords. Which of them a hook is says the signature of its method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from karvan.compat.recis.framework.metrics import add_metric, get_log_metrics
from karvan.compat.recis.hooks.hook import Hook
from karvan.compat.unsupported import UnsupportedError
from karvan.train.callbacks import Callback, TrainerView
from karvan.train.reporting.results import FitResult, StepLogs

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

    def begin_training(self) -> None:
        """A training batch is about to be computed; several can make a step."""
        self._end_trained_batch()

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

    def _end_trained_batch(self) -> None:
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
        self._end_trained_batch()

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
    kinds = {each.kind for each in called.parameters.values()}
    named = [each for each in called.parameters.values() if each.kind not in _VARIABLE]
    foreign = any(each.default is Parameter.empty and each.name not in values for each in named)
    if foreign or kinds == {Parameter.VAR_POSITIONAL}:
        return tuple(values[name] for name in _FIRST_GENERATION.get(moment, ())), {}
    if Parameter.VAR_KEYWORD in kinds:
        return (), dict(values)
    return (), {each.name: values[each.name] for each in named if each.name in values}


_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
