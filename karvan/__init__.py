"""Karvan trains recommendation models whose embedding tables outgrow a machine."""

import importlib
from typing import TYPE_CHECKING, Any

from karvan import ids
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

if TYPE_CHECKING:
    from karvan import checkpoint, data, models, train
    from karvan.checkpoint import Checkpoints
    from karvan.train import Trainer, losses, metrics

__version__ = "0.1.0"

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "Age",
    "Always",
    "Batch",
    "Checkpoints",
    "EmbeddingEngine",
    "Feature",
    "FeatureEngine",
    "HashStack",
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
    "Trainer",
    "checkpoint",
    "data",
    "get_num_threads",
    "ids",
    "init",
    "losses",
    "metrics",
    "models",
    "optim",
    "set_num_threads",
    "train",
]


# Modules, and where classes are found: they bring along what those who only embed need not wait for.
_LATER = {
    "Checkpoints": "karvan.checkpoint",
    "Trainer": "karvan.train",
    "checkpoint": "karvan.checkpoint",
    "data": "karvan.data",
    "losses": "karvan.train.losses",
    "metrics": "karvan.train.metrics",
    "models": "karvan.models",
    "train": "karvan.train",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'karvan' has no attribute '{name}'")
    module = importlib.import_module(_LATER[name])
    return getattr(module, name) if name[0].isupper() else module
