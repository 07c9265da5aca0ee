"""Embeddings, over `kv.EmbeddingEngine`."""

from karvan.compat.recis.nn.modules.embedding import DynamicEmbedding, EmbeddingOption
from karvan.compat.recis.nn.modules.embedding_engine import EmbeddingEngine
from karvan.compat.recis.nn.modules.hashtable import HashTable
from karvan.compat.unsupported import missing_names

__all__ = ["DynamicEmbedding", "EmbeddingEngine", "EmbeddingOption", "HashTable"]

__getattr__ = missing_names(
    "recis.nn", {"NoReduceEmbedding": 'use kv.Table(combiner="ragged"), which gives every vector.'}
)
