"""`Embedding`: vectors of ids of any number, whose rows are on the parameter servers of a job."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from karvan.compat.elasticdl.contract import ContractError
from karvan.embedding import EmbeddingEngine, Table, init
from karvan.ragged import Ragged


class Embedding(nn.Module):
    """Vectors of `output_dim` numbers for ids, a tensor (samples,) or (samples, length).

    name: of the table, the same in every worker and no other layer's. combiner: "sum", "mean" or "sqrtn" of
    the ids of a sample; without one the result is (samples, output_dim) or (samples, length, output_dim).
    """

    def __init__(
        self,
        output_dim: int,
        name: str,
        combiner: str | None = None,
        embeddings_initializer: init.Initialiser | None = None,
    ) -> None:
        super().__init__()
        if combiner not in (None, "sum", "mean", "sqrtn"):
            raise ContractError(f"Embedding expects a combiner sum, mean or sqrtn, got '{combiner}'.")
        self.name = name
        self._combiner = combiner
        first = init.Uniform() if embeddings_initializer is None else embeddings_initializer
        table = Table(output_dim, name=name, combiner=combiner or "sum", init=first)
        self.engine = EmbeddingEngine({name: table})

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors."""
        if ids.dim() not in (1, 2) or ids.is_floating_point():
            raise ContractError(
                f"Embedding '{self.name}' expects whole numbers (samples,) or (samples, length), got "
                f"{tuple(ids.shape)} {ids.dtype}."
            )
        flat = ids.reshape(-1).to(torch.int64)
        if self._combiner is None or ids.dim() == 1:
            vectors: Tensor = self.engine({self.name: flat})[self.name]
            return vectors.reshape(*ids.shape, -1)
        length = ids.shape[1]
        offsets = torch.arange(len(ids) + 1, dtype=torch.int64, device=ids.device) * length
        pooled: Tensor = self.engine({self.name: Ragged(flat, offsets)})[self.name]
        return pooled
