"""DLRM: Naumov et al., "Deep Learning Recommendation Model", 2019, https://arxiv.org/abs/1906.00091."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from karvan.embedding import EmbeddingEngine
from karvan.models.interaction import pairwise_dots
from karvan.models.parts import Names, Numbers, Tables, mlp, names_in, tables_of


class DLRM(nn.Module):
    """A bottom net makes a vector of the numbers; a top net sees it and how all pairs of vectors match.

    numbers, ids: names in the batch. bottom, top: sizes of the hidden layers; the bottom net ends in `dim`,
    the top net in one logit. Without numbers there is no bottom net. table: see `kv.models.parts.tables_of`.
    """

    def __init__(
        self,
        numbers: Names,
        ids: Sequence[str],
        dim: int = 16,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (512, 256),
        *,
        dropout: float = 0.0,
        table: Tables = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.ids = names_in(ids)
        self.numbers = Numbers(numbers)
        self.embeddings = EmbeddingEngine(tables_of(self.ids, dim, table), seed=seed)
        self.bottom = mlp(self.numbers.width, [*bottom, dim]) if self.numbers.width else None
        vectors = len(self.ids) + (self.bottom is not None)
        width = vectors * (vectors - 1) // 2 + (dim if self.bottom else 0)
        if not width:
            raise ValueError(f"DLRM expects numbers or at least two ids, got ids {self.ids}.")
        self.top = mlp(width, top, 1, dropout=dropout)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """The logits, (B,)."""
        embedded = self.embeddings(batch)
        vectors = [embedded[name] for name in self.ids]
        first = None if self.bottom is None else self.bottom(self.numbers(batch))
        pairs = pairwise_dots(vectors if first is None else [first, *vectors], first)
        return cast(Tensor, self.top(pairs)).squeeze(1)
