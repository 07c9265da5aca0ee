"""`LoggerHook`: a line of numbers every few steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from karvan.compat.recis.hooks.hook import Hook
from karvan.compat.recis.utils.logger import Logger

_FIRST = ("epoch", "loss")


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
        names = [*(name for name in _FIRST if name in metrics), *(n for n in metrics if n not in _FIRST)]
        return "".join(f" <{name}={_text(metrics[name])}>" for name in names)

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
