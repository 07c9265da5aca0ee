"""DCN-v2: Wang et al., "Improved Deep & Cross Network", 2020, https://arxiv.org/abs/2008.13535."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from karvan.embedding import EmbeddingEngine
from karvan.models.parts import Names, Numbers, Tables, beside, mlp, names_in, tables_of


class Cross(nn.Module):
    """One layer of crosses: x0 * (W x + b) + x, with W a full matrix or the product of two thin ones."""

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.inner = None if rank is None else nn.Linear(width, rank, bias=False)
        self.outer = nn.Linear(width if rank is None else rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """x with crosses of one degree more."""
        return torch.addcmul(x, x0, self.outer(x if self.inner is None else self.inner(x)))


class DCN(nn.Module):
    """Layers that cross all inputs explicitly, before a net ("stacked") or beside it ("parallel").

    crosses: the number of layers; n of them make crosses of up to n + 1 inputs. rank: of their matrices, None
    for full ones. hidden: sizes of the net's layers. table: see `kv.models.parts.tables_of`.
    """

    def __init__(
        self,
        numbers: Names,
        ids: Sequence[str],
        dim: int = 16,
        crosses: int = 3,
        hidden: Sequence[int] = (256, 128),
        *,
        rank: int | None = None,
        structure: str = "stacked",
        dropout: float = 0.0,
        table: Tables = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if structure not in ("stacked", "parallel"):
            raise ValueError(f"DCN expects structure 'stacked' or 'parallel', got '{structure}'.")
        self.ids = names_in(ids)
        self.structure = structure
        self.numbers = Numbers(numbers)
        self.embeddings = EmbeddingEngine(tables_of(self.ids, dim, table), seed=seed)
        width = self.numbers.width + dim * len(self.ids)
        self.crosses = nn.ModuleList(Cross(width, rank) for _ in range(crosses))
        self.net = mlp(width, hidden, dropout=dropout)
        deep = hidden[-1] if hidden else width
        self.head = nn.Linear(deep if structure == "stacked" else deep + width, 1)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """The logits, (B,)."""
        embedded = self.embeddings(batch)
        x0 = beside(self.numbers, batch, (embedded[name] for name in self.ids))
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        last = self.net(x) if self.structure == "stacked" else torch.cat([x, self.net(x0)], 1)
        return cast(Tensor, self.head(last)).squeeze(1)
