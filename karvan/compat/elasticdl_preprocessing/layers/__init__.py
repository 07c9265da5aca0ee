"""Preprocessing layers of ElasticDL, over steps of `kv.Feature` and `kv.EmbeddingEngine`."""

from karvan.compat.elasticdl_preprocessing.layers.concatenate_with_offset import ConcatenateWithOffset
from karvan.compat.elasticdl_preprocessing.layers.discretization import Discretization
from karvan.compat.elasticdl_preprocessing.layers.hashing import Hashing
from karvan.compat.elasticdl_preprocessing.layers.index_lookup import IndexLookup
from karvan.compat.elasticdl_preprocessing.layers.log_round import LogRound
from karvan.compat.elasticdl_preprocessing.layers.normalizer import Normalizer
from karvan.compat.elasticdl_preprocessing.layers.round_identity import RoundIdentity
from karvan.compat.elasticdl_preprocessing.layers.sparse_embedding import SparseEmbedding
from karvan.compat.elasticdl_preprocessing.layers.to_number import ToNumber
from karvan.compat.elasticdl_preprocessing.layers.to_ragged import ToRagged
from karvan.compat.elasticdl_preprocessing.layers.to_sparse import ToSparse

__all__ = [
    "ConcatenateWithOffset",
    "Discretization",
    "Hashing",
    "IndexLookup",
    "LogRound",
    "Normalizer",
    "RoundIdentity",
    "SparseEmbedding",
    "ToNumber",
    "ToRagged",
    "ToSparse",
]
