"""Karvan trains recommendation models whose embedding tables outgrow a machine."""

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
    from karvan import data, models
    from karvan.train import metrics

__version__ = "0.1.0"

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "Age",
    "Always",
    "Batch",
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
    "data",
    "get_num_threads",
    "ids",
    "init",
    "metrics",
    "models",
    "optim",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    if name == "data":  # brings pyarrow along, which those who only embed need not wait for
        import karvan.data

        return karvan.data
    if name == "models":
        import karvan.models

        return karvan.models
    if name == "metrics":
        import karvan.train.metrics

        return karvan.train.metrics
    raise AttributeError(f"module 'karvan' has no attribute '{name}'")
