"""States of all ranks: their random generators, and gathering of state, metrics and losses without pickle."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from karvan.checkpoint.state_tree import pack, unpack
from karvan.distributed import CollectiveChannel
from karvan.train.types import MetricLike

# The state of all random generators that a training step may draw from, as a tree of tensors.


def random_state() -> dict[str, Any]:
    """Of torch, on the CPU and on GPUs in use, of numpy and of Python."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        "numpy": {
            "kind": legacy["bit_generator"],
            "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    legacy = state["numpy"]
    key = legacy["key"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], key, legacy["pos"], legacy["has_gauss"], legacy["gauss"]))
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))


@contextmanager
def same_random_state_afterwards() -> Iterator[None]:
    """Restore the generators afterwards, whatever was drawn inside."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def seed_random(*numbers: int) -> None:
    """Seed all generators by these numbers, so that what follows depends on nothing else."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def gather_state(channel: CollectiveChannel, state: Any) -> list[Any]:
    """The trees of all ranks, in their order: dicts, lists, numbers, text and tensors."""
    return [state] if channel.world_size == 1 else [unpack(data) for data in channel.gather(pack(state))]


def merged(channel: CollectiveChannel, metrics: Mapping[str, MetricLike]) -> dict[str, float]:
    """The metrics over the samples of all ranks."""
    if channel.world_size == 1 or not metrics:
        return {name: metric.compute() for name, metric in metrics.items()}
    states = gather_state(channel, {name: metric.state() for name, metric in metrics.items()})
    return {
        name: joined(metric, [state[name] for state in states]).compute() for name, metric in metrics.items()
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
    for rank_values in channel.gather_json(dict(values)):
        for name, value in rank_values.items():
            sums[name] = sums.get(name, 0) + value
    return sums
