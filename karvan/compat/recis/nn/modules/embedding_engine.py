"""`EmbeddingEngine`: the embeddings of a model's features by a `kv.EmbeddingEngine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from karvan.compat.recis.connection import connect_ranks
from karvan.compat.recis.nn.modules.embedding import EmbeddingOption, as_vectors
from karvan.compat.recis.nn.modules.hashtable import make_engine
from karvan.compat.recis.ragged.tensor import to_karvan


class EmbeddingEngine(nn.Module):
    """Embeds features; entries of other names are passed through."""

    def __init__(self, emb_options: Mapping[str, EmbeddingOption]) -> None:
        super().__init__()
        for option in emb_options.values():
            connect_ranks(option.grad_reduce_by or "worker", option.device)
        self._options = dict(emb_options)
        self.engine = make_engine({name: option.table() for name, option in emb_options.items()})

    def forward(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """The samples with vectors in place of ids; a feature that they lack is not in the result."""
        ids = {name: to_karvan(samples[name]) for name in self._options if name in samples}
        if not ids:
            expected = ", ".join(self._options)
            raise KeyError(f"EmbeddingEngine expects samples with some of {expected}, got {list(samples)}.")
        made = self.engine(ids)
        vectors = {name: as_vectors(name, made[name], self._options[name].trainable) for name in ids}
        return {**samples, **vectors}
