"""Gathers state, metrics and losses from all ranks, without pickle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from karvan.checkpoint.format.state_tree import pack, unpack
from karvan.distributed import CollectiveChannel
from karvan.train.types import MetricLike


def gather_state(channel: CollectiveChannel, state: Any) -> list[Any]:
    """The trees of all ranks, in their order: dicts, lists, numbers, text and tensors."""
    return [state] if channel.world_size == 1 else [unpack(data) for data in channel.gather(pack(state))]


def merged(channel: CollectiveChannel, metrics: Mapping[str, MetricLike]) -> dict[str, float]:
    """The metrics over the samples of all ranks."""
    if channel.world_size == 1 or not metrics:
        return {name: metric.compute() for name, metric in metrics.items()}
    states = gather_state(channel, {name: metric.state() for name, metric in metrics.items()})
    return {
        name: joined(metric, [each[name] for each in states]).compute() for name, metric in metrics.items()
    }


def joined(metric: MetricLike, states: list[Any]) -> MetricLike:
    """A copy of this metric that combines these states."""
    copied = copy.deepcopy(metric)
    merge = require_merge(copied)
    copied.reset()
    for state in states:
        merge(state)
    return copied


def require_merge(metric: MetricLike) -> Callable[[Any], None]:
    """The metric's `merge`, or a TypeError if it has none."""
    merge: Callable[[Any], None] | None = getattr(metric, "merge", None)
    if merge is None:
        raise TypeError(
            f"{type(metric).__name__} has no merge(state): a metric needs it to train on several ranks."
        )
    return merge


def summed(channel: CollectiveChannel, values: Mapping[str, float]) -> dict[str, float]:
    """Numbers by name, added up in the order of ranks; a rank may lack some."""
    sums: dict[str, float] = {}
    for each in channel.gather_json(dict(values)):
        for name, value in each.items():
            sums[name] = sums.get(name, 0) + value
    return sums
