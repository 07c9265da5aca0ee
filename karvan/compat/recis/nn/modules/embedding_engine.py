"""`EmbeddingEngine`: the embeddings of a model's features by a `kv.EmbeddingEngine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from karvan.compat.recis.connection import connect_ranks
from karvan.compat.recis.nn.modules.embedding import EmbeddingOption, as_vectors
from karvan.compat.recis.nn.modules.hashtable import make_engine
from karvan.compat.recis.ragged.tensor import RaggedTensor, to_karvan


class EmbeddingEngine(nn.Module):
    """Embeds features; entries of other names are passed through, lists as dense tensors.

    Lists are filled up with zeros to the longest of the batch; those of bytes stay as they are.
    use_pinned_memory changes nothing: copies to a GPU are made from page-locked memory anyway.
    """

    def __init__(self, emb_options: Mapping[str, EmbeddingOption], use_pinned_memory: bool = False) -> None:
        super().__init__()
        for option in emb_options.values():
            connect_ranks(option.grad_reduce_by or "worker", option.device)
        self._options = dict(emb_options)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the dense rows of the newest batch with samples
        self.engine = make_engine({name: option.table() for name, option in emb_options.items()})

    def forward(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """The samples with vectors in place of ids; a feature that they lack is not in the result."""
        ids = {name: to_karvan(samples[name]) for name in self._options if name in samples}
        if not ids:
            expected = ", ".join(self._options)
            raise KeyError(f"EmbeddingEngine expects samples with some of {expected}, got {list(samples)}.")
        made = self.engine(ids)
        others = {name: self._dense(name, each) for name, each in samples.items() if name not in ids}
        vectors = {name: as_vectors(name, made[name], self._options[name].trainable) for name in ids}
        return {**others, **vectors}

    def _dense(self, name: str, entry: Any) -> Any:
        """An entry without an embedding as RecIS gives it to the model."""
        if not isinstance(entry, RaggedTensor) or entry.dtype is torch.int8:
            return entry
        dense = entry.to_dense()
        if len(dense):
            self._shapes[name] = tuple(dense.shape[1:])
            return dense
        # A batch without samples, of a rank whose data has ended, is as wide as those before.
        return dense.new_zeros((0, *self._shapes.get(name, (1,) * (dense.dim() - 1))))
