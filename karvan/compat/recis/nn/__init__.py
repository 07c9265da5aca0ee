"""Embeddings, over `kv.EmbeddingEngine`."""

from karvan.compat.recis.nn.modules.embedding import DynamicEmbedding, EmbeddingOption, NoReduceEmbedding
from karvan.compat.recis.nn.modules.embedding_engine import EmbeddingEngine
from karvan.compat.recis.nn.modules.hashtable import HashTable

__all__ = ["DynamicEmbedding", "EmbeddingEngine", "EmbeddingOption", "HashTable", "NoReduceEmbedding"]
