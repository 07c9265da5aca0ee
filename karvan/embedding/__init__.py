"""Tables, the engine that embeds a batch, admission, eviction, initialisers and sparse optimizers."""

from karvan.embedding import init, optim
from karvan.embedding.admission import Always, MinCount, Probability, ReadOnly
from karvan.embedding.engine import EmbeddingEngine
from karvan.embedding.eviction import LFU, LRU, TTL, Age, Never, Norm
from karvan.embedding.table import HashStack, Table
from karvan.embedding.table_handle import TableHandle

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "Age",
    "Always",
    "EmbeddingEngine",
    "HashStack",
    "MinCount",
    "Never",
    "Norm",
    "Probability",
    "ReadOnly",
    "Table",
    "TableHandle",
    "init",
    "optim",
]
