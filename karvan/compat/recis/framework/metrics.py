"""`add_metric`: numbers that a model reports while it computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from karvan.compat.recis.metrics.accumulated import is_accumulated
from karvan.train import report

_metrics: dict[str, Any] = {}
_accumulated: set[str] = set()  # names of numbers that count all batches


def add_metric(name: str, metric: Any) -> None:
    """Report a number: hooks get the newest of each name, and `LoggerHook` shows them.

    Numbers that a model reports in its forward are in Karvan's reports, too: see `kv.train.report`.
    """
    _metrics[name] = metric.detach() if isinstance(metric, Tensor) else metric
    (_accumulated.add if is_accumulated(metric) else _accumulated.discard)(name)
    is_number = metric.numel() == 1 if isinstance(metric, Tensor) else isinstance(metric, int | float)
    if is_number and name != "loss":  # which the Trainer reports itself
        report(name, metric)


def evaluated_metrics(means: Mapping[str, float]) -> dict[str, Any]:
    """The result of an evaluation, given the means over its samples, which are those of all ranks.

    A number that counts all batches itself, as that of `AUROC` does, is the newest one instead, and so is one
    that has no mean, since it is not a number of one element.
    """
    newest = {name: value for name, value in _metrics.items() if name in _accumulated or name not in means}
    return {**means, **newest}


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


get_global_metrics = get_log_metrics  # its name in RecIS 1.0
