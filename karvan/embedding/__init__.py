"""Tables, the engine that embeds a batch, admission, eviction, initialisers and sparse optimizers."""

from karvan.argument_checks import publish
from karvan.embedding import admission, eviction, init, optim
from karvan.embedding.engine import EmbeddingEngine
from karvan.embedding.table import HashStack, Table
from karvan.embedding.table_handle import TableHandle

__all__ = ["EmbeddingEngine", "HashStack", "Table", "TableHandle", "admission", "eviction", "init", "optim"]

publish("karvan.embedding")
