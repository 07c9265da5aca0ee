"""`add_metric`: numbers that a model reports while it computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_metrics: dict[str, Any] = {}


def add_metric(name: str, metric: Any) -> None:
    """Report a number: hooks get the newest of each name, and `LoggerHook` shows them."""
    _metrics[name] = metric.detach() if isinstance(metric, Tensor) else metric


def get_log_metrics() -> dict[str, Any]:
    """The newest number of each name."""
    return _metrics
