"""`SharedMetrics`: the training metrics of all trainers of a round, which each of them has complete.

Before a step is committed, every trainer gets what metrics need of the others' batches: scores, labels,
weights and groups. When it is committed, each counts all of them, in the order of the batches. So metrics are
the same on all trainers, no sample is lost with a trainer, and the number of trainers does not change them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from karvan.distributed import CollectiveChannel
from karvan.metrics.base import Metric
from karvan.train.state.gathering import gather_state, require_merge
from karvan.train.types import MetricLike


class SharedMetrics:
    """Counts the batches of committed steps in metrics; by name."""

    def __init__(self, metrics: Mapping[str, MetricLike]) -> None:
        self._metrics = dict(metrics)
        for metric in self._metrics.values():
            require_merge(metric)
        self._mine: dict[int, dict[str, Any]] = {}  # of this trainer's batches, by number
        self._step: list[dict[str, Any]] = []  # of all batches of the step, in their order

    def read(self, number: int, output: Any, batch: Any) -> None:
        """Take what metrics need of one of this trainer's batches, and of the model's output for it."""
        tensors: dict[tuple[Any, ...], Tensor] = {}  # several metrics may need the same
        uses: dict[str, dict[str, int]] = {}
        for name, metric in self._metrics.items():
            uses[name] = {}
            for role, tensor in _taken(metric, output, batch).items():
                key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
                tensors.setdefault(key, tensor)
                uses[name][role] = list(tensors).index(key)
        self._mine[number] = {"tensors": [_copy(each) for each in tensors.values()], "uses": uses}

    def share(self, channel: CollectiveChannel, mine: Sequence[tuple[int, int]]) -> None:
        """Exchange what was read with all trainers; a collective. mine: places and numbers of own batches."""
        if not self._metrics:
            return
        own = [[place, self._mine[number]] for place, number in mine if number in self._mine]
        everything = [each for said in gather_state(channel, own) for each in said]
        self._step = [read for _, read in sorted(everything, key=lambda each: int(each[0]))]

    def count(self) -> None:
        """Count the batches of the step, which is committed."""
        for read in self._step:
            for name, metric in self._metrics.items():
                _add(metric, {role: read["tensors"][index] for role, index in read["uses"][name].items()})
        self.forget()

    def forget(self) -> None:
        """Forget the batches of the step."""
        self._mine, self._step = {}, []


def _selects(metric: MetricLike) -> bool:
    """Whether `update` of the metric is that of its base, which tells what it needs."""
    return isinstance(metric, Metric) and type(metric).update is Metric.update


def _taken(metric: MetricLike, output: Any, batch: Any) -> Mapping[str, Tensor]:
    """What the metric needs of a batch: tensors, or its state after this batch alone."""
    if isinstance(metric, Metric) and _selects(metric):
        return metric.select(output, batch)
    alone = copy.deepcopy(metric)
    alone.reset()
    alone.update(output, batch)
    return alone.state()


def _add(metric: MetricLike, taken: Mapping[str, Tensor]) -> None:
    """Count what `_taken` gave."""
    if isinstance(metric, Metric) and _selects(metric):
        metric.add_selection(taken)
    else:
        require_merge(metric)(taken)


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, and not in memory that a later batch may use."""
    return tensor.detach().to("cpu", copy=True).contiguous()
