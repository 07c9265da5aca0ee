"""`HookCalls`: calls RecIS's hooks from the callbacks of a `kv.Trainer` and from a model's forward."""

from __future__ import annotations

from typing import Any

from karvan.compat.recis.framework.metrics import add_metric, get_log_metrics
from karvan.compat.recis.hooks.hook import Hook
from karvan.compat.unsupported import UnsupportedError
from karvan.train.callbacks import Callback, TrainerView
from karvan.train.reporting.results import FitResult, StepLogs


class HookCalls(Callback):
    """All hooks of a Trainer."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self._within_epoch = False
        self.step = 0
        self._computed = False  # whether this rank has had a batch since the last step

    def add(self, hook: Hook) -> None:
        """Add a hook."""
        if hasattr(hook, "after_backward"):
            raise UnsupportedError(
                f"after_backward of {type(hook).__name__}",
                "clip gradients by ClipGradNormHook, or those of rows by kv.optim.AdamW(clip_norm=…).",
            )
        self.hooks.append(hook)

    def call(self, moment: str, *args: Any, **options: Any) -> None:
        """Call all hooks."""
        for hook in self.hooks:
            getattr(hook, moment)(*args, **options)

    def begin_batch(self, samples: Any, training: bool) -> None:
        """A batch is about to be computed."""
        self._computed = True
        if training and not self._within_epoch:
            self._within_epoch = True
            self.call("before_epoch", is_train=True)
        self.call("before_step", is_train=training)
        self.call("after_data", is_train=training, data=samples)

    def end_evaluated_batch(self, result: Any) -> None:
        """A batch of an evaluation has been computed."""
        self.call(
            "after_step",
            is_train=False,
            metrics=get_log_metrics(),
            global_step=self.step,
            eval_result=result,
        )

    def on_step_end(self, trainer: TrainerView, logs: StepLogs) -> None:
        """See `Callback.on_step_end`."""
        self.step = trainer.step
        add_metric("epoch", logs.epoch)
        if self._computed:  # otherwise the data of this rank has ended
            add_metric("loss", logs.losses["loss"])
        self._computed = False
        self.call("after_step", is_train=True, metrics=get_log_metrics(), global_step=trainer.step)

    def on_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        """See `Callback.on_epoch_end`."""
        self.call("out_off_data")
        self._end_epoch()

    def on_fit_end(self, trainer: TrainerView, result: FitResult) -> None:
        """See `Callback.on_fit_end`."""
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._within_epoch:
            self._within_epoch = False
            self.call("after_train")
            self.call("after_epoch", is_train=True)
