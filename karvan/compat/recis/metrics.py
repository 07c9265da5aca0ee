"""Numbers that a model reports while it computes, and metrics inside of models, over `kv.metrics`.

Metrics count all batches since their reset: of an evaluation, the newest number is the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from karvan import distributed, metrics
from karvan.train import report

__all__ = ["AUROC", "Gauc"]


class AccumulatedFloat(float):
    """A number of all batches."""

    accumulated = True


def accumulated_tensor(value: float) -> Tensor:
    """The same as a tensor."""
    tensor = torch.tensor(value)
    setattr(tensor, "accumulated", True)  # noqa: B010 - tensors declare no such attribute
    return tensor


def is_accumulated(value: Any) -> bool:
    """Whether a number is of all batches."""
    return bool(getattr(value, "accumulated", False))


_LEAST_BINS = 4096


class AUROC(nn.Module):
    """The area under the ROC curve of all samples since the last reset.

    num_thresholds is at least how finely scores are told apart. dist_sync_on_step: `update` counts the
    samples of all ranks, which then call it together.
    """

    def __init__(self, num_thresholds: int = 200, dist_sync_on_step: bool = False) -> None:
        super().__init__()
        if num_thresholds <= 2:
            raise ValueError(f"AUROC expects num_thresholds above 2, got {num_thresholds}.")
        self.num_thresholds, self.dist_sync_on_step = num_thresholds, dist_sync_on_step
        self._all = self._empty()

    def _empty(self) -> metrics.AUC:
        return metrics.AUC(bins=max(_LEAST_BINS, self.num_thresholds), logits=False)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count probabilities and labels."""
        channel = distributed.current().here
        if not self.dist_sync_on_step or channel.world_size == 1:
            self._all.add(predictions, labels)
            return
        batch = self._empty()
        batch.add(predictions, labels)
        self._all.merge({name: channel.sum(counts) for name, counts in batch.state().items()})

    def compute(self) -> Tensor:
        """The AUC; NaN while there is one class only."""
        return accumulated_tensor(self._all.compute())

    def forward(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """The AUC of these samples alone; nothing is counted."""
        batch = self._empty()
        batch.add(predictions, labels)
        return torch.tensor(batch.compute())

    def reset(self) -> None:
        """Forget all samples."""
        self._all.reset()

    def get_extra_state(self) -> dict[str, Any]:
        """All that has been counted, for `state_dict`."""
        return dict(self._all.state())

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._all.load_state(state)


class Gauc(nn.Module):
    """The mean AUC of groups, weighted by their clicks: of a batch, and of all batches since the last reset.

    A group counts in each batch by itself, on every rank; one with a single class has no AUC. RecIS 1.0 loses
    the first and the last group of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._totals = torch.zeros(2, dtype=torch.float64)

    @torch.no_grad()
    def forward(self, labels: Tensor, predictions: Tensor, indicators: Tensor) -> tuple[float, float]:
        """Count a batch: its GAUC and that of all batches, of all ranks; 0 if no group has two classes."""
        batch = metrics.GAUC(logits=False, weighting="clicks")
        batch.add(predictions, labels, groups=indicators)
        totals = distributed.current().here.sum(torch.tensor(batch.totals(), dtype=torch.float64))
        self._totals = self._totals + totals
        return _ratio(totals), AccumulatedFloat(_ratio(self._totals))


def _ratio(totals: Tensor) -> float:
    return float(totals[0] / totals[1]) if totals[1] else 0.0


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
        if isinstance(value, float | Tensor) and torch.as_tensor(value).isnan().any():
            del _metrics[name]
            _metrics.update({name: before[name]} if name in before else {})


def get_log_metrics() -> dict[str, Any]:
    """The newest number of each name."""
    return _metrics


get_global_metrics = get_log_metrics  # its name in RecIS 1.0
