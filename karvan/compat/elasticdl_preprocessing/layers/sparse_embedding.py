"""`SparseEmbedding`: the vectors of each row's ids, added up or averaged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from karvan.compat.elasticdl.python.elasticdl.layers.embedding import Embedding
from karvan.compat.elasticdl.python.elasticdl.layers.table_names import table_name
from karvan.compat.elasticdl_preprocessing.layers.base import layer_input
from karvan.compat.elasticdl_preprocessing.layers.to_ragged import rows_without
from karvan.embedding import init


class SparseEmbedding(torch.nn.Module):
    """Vectors of `output_dim` numbers for rows of ids, a `kv.Ragged`; a row without ids gets zeros.

    input_dim: ids are below it; 0 or None allows any. combiner: "sum", "mean" or "sqrtn". In a dense tensor
    0 is no id. name: of the table, the same in every worker.
    """

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: init.Initialiser | str = "uniform",
        combiner: str = "mean",
        *,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if combiner not in ("sum", "mean", "sqrtn"):
            raise ValueError(f"SparseEmbedding expects a combiner sum, mean or sqrtn, got {combiner!r}.")
        self.name = table_name("sparse_embedding", name)
        self.embedding = Embedding(
            output_dim, input_dim, embeddings_initializer, combiner=combiner, name=self.name
        )

    def forward(self, inputs: Any) -> Tensor:
        """The vectors, (samples, output_dim)."""
        entry, shape = layer_input(inputs)
        if shape is not None:
            assert isinstance(entry, Tensor)
            entry = rows_without(entry.reshape(shape), 0)
        vectors: Tensor = self.embedding(entry)
        return vectors
