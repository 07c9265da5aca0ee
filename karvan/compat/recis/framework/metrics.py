"""`add_metric`: numbers that a model reports while it computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from karvan.train import report

_metrics: dict[str, Any] = {}


def add_metric(name: str, metric: Any) -> None:
    """Report a number: hooks get the newest of each name, and `LoggerHook` shows them.

    Numbers that a model reports in its forward are in Karvan's reports, too: see `kv.train.report`.
    """
    _metrics[name] = metric.detach() if isinstance(metric, Tensor) else metric
    is_number = metric.numel() == 1 if isinstance(metric, Tensor) else isinstance(metric, int | float)
    if is_number and name != "loss":  # which the Trainer reports itself
        report(name, metric)


def restore_metrics(before: Mapping[str, Any]) -> None:
    """Numbers that have become NaN are as before, or gone: those of a batch without samples."""
    for name, value in list(_metrics.items()):
        if _is_nan(value):
            del _metrics[name]
            _metrics.update({name: before[name]} if name in before else {})


def _is_nan(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.isnan().any())
    return isinstance(value, float) and math.isnan(value)


def get_log_metrics() -> dict[str, Any]:
    """The newest number of each name."""
    return _metrics
