"""Karvan trains recommendation models whose embedding tables outgrow a machine."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from karvan import checkpoint, data, ids, metrics, models, train
    from karvan.checkpoint import Checkpoints
    from karvan.cluster.loader.context import DataContext
    from karvan.cluster.loader_stream.stream import stream
    from karvan.distributed import connect, disconnect
    from karvan.embedding import (
        LFU,
        LRU,
        TTL,
        Age,
        Always,
        EmbeddingEngine,
        HashStack,
        MinCount,
        Never,
        Norm,
        Probability,
        ReadOnly,
        Table,
        TableHandle,
        init,
        optim,
    )
    from karvan.features import Feature, FeatureEngine
    from karvan.ragged import Batch, NestedRagged, Padded, Ragged
    from karvan.store import MemoryStore, Rows, Store
    from karvan.threads import get_num_threads, set_num_threads
    from karvan.train import EvalContext, InferContext, TrainContext, Trainer, TrainingJob, losses

__version__ = "0.1.0"

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "Age",
    "Always",
    "Batch",
    "Checkpoints",
    "DataContext",
    "EmbeddingEngine",
    "EvalContext",
    "Feature",
    "FeatureEngine",
    "HashStack",
    "InferContext",
    "MemoryStore",
    "MinCount",
    "NestedRagged",
    "Never",
    "Norm",
    "Padded",
    "Probability",
    "Ragged",
    "ReadOnly",
    "Rows",
    "Store",
    "Table",
    "TableHandle",
    "TrainContext",
    "Trainer",
    "TrainingJob",
    "checkpoint",
    "connect",
    "data",
    "disconnect",
    "get_num_threads",
    "ids",
    "init",
    "losses",
    "metrics",
    "models",
    "optim",
    "set_num_threads",
    "stream",
    "train",
]

# Where each public name lives. It is imported when it is first asked for, so that those who only embed need
# not wait for pyarrow, and `karvan --help` not for torch.
_HOMES = {
    "karvan": "checkpoint data ids models train",
    "karvan.checkpoint": "Checkpoints",
    "karvan.cluster.loader.context": "DataContext",
    "karvan.cluster.loader_stream.stream": "stream",
    "karvan.embedding": "LFU LRU TTL Age Always EmbeddingEngine HashStack MinCount Never Norm Probability "
    "ReadOnly Table TableHandle init optim",
    "karvan.features": "Feature FeatureEngine",
    "karvan.distributed": "connect disconnect",
    "karvan.ragged": "Batch NestedRagged Padded Ragged",
    "karvan.store": "MemoryStore Rows Store",
    "karvan.threads": "get_num_threads set_num_threads",
    "karvan.train": "EvalContext InferContext TrainingJob TrainContext Trainer losses metrics",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'karvan' has no attribute '{name}'")
    home = _HOME[name]
    found = (
        importlib.import_module(f"karvan.{name}")
        if home == "karvan"
        else getattr(importlib.import_module(home), name)
    )
    globals()[name] = found  # the next one finds it without a call
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
