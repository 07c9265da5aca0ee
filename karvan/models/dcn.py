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
    """DCN v2: layers that cross all inputs explicitly, and a net (Wang et al., 2021).

    Args:
        numbers: The names of columns of numbers in a batch; a mapping of names to widths for columns of
            several numbers.
        ids: The names of columns of ids in a batch. Lists of ids are averaged.
        dim: The number of elements of a vector.
        crosses: The number of cross layers; n of them make crosses of up to n + 1 inputs.
        hidden: The sizes of the net's hidden layers.
        rank: The rank of the cross layers' matrices; None for full ones.
        structure: Whether the net comes after the cross layers, "stacked", or beside them, "parallel".
        dropout: The share of units of hidden layers that are dropped in training.
        table: A `kv.Table` as a template for all ids, or tables of some ids by name. By default, means of
            rows that start within ±1 / sqrt(dim).
        seed: The seed of new rows.

    Raises:
        ValueError: `structure` is unknown.

    Example:
        >>> model = kv.models.DCN([], ids=["user", "item"], dim=8, crosses=2)
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([7, 8])}
        >>> model(batch).shape
        torch.Size([2])
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
        """Compute the logits of a batch.

        Args:
            batch: Columns by name.

        Returns:
            The logits, (B,).
        """
        embedded = self.embeddings(batch)
        x0 = beside(self.numbers, batch, (embedded[name] for name in self.ids))
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        last = self.net(x) if self.structure == "stacked" else torch.cat([x, self.net(x0)], 1)
        return cast(Tensor, self.head(last)).squeeze(1)
