"""Wide & Deep: Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016,
https://arxiv.org/abs/1606.07792.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from karvan.embedding import EmbeddingEngine, Table, init
from karvan.models.parts import Names, Numbers, Tables, beside, mlp, names_in, tables_of


class WideDeep(nn.Module):
    """Wide & Deep: a linear model that remembers, and a net that generalises (Cheng et al., 2016).

    Weights of the wide part start at 0 in tables of one column named "wide.NAME", in an engine of their own,
    `model.wide`. So they can have an optimizer of their own, such as `kv.optim.FTRL(model.wide)`.

    Args:
        numbers: The names of columns of numbers in a batch; a mapping of names to widths for columns of
            several numbers.
        ids: The names of columns of ids in a batch. Lists of ids are averaged.
        wide: The ids of the linear model, usually crosses: `kv.Feature("a_x_b").cross("a", "b")`. An id may
            be in both parts.
        dim: The number of elements of a vector.
        hidden: The sizes of the net's hidden layers.
        dropout: The share of units of hidden layers that are dropped in training.
        table: A `kv.Table` as a template for the deep part's ids, or tables of some ids by name.
        wide_table: A template for the wide part's tables.
        seed: The seed of new rows.

    Example:
        >>> model = kv.models.WideDeep([], ids=["user"], wide=["item"], dim=8)
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([7, 8])}
        >>> model(batch).shape
        torch.Size([2])
    """

    def __init__(
        self,
        numbers: Names,
        ids: Sequence[str],
        wide: Sequence[str],
        dim: int = 16,
        hidden: Sequence[int] = (256, 128),
        *,
        dropout: float = 0.0,
        table: Tables = None,
        wide_table: Table | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.ids, self.wide_ids = names_in(ids), list(wide)
        self.numbers = Numbers(numbers)
        self.embeddings = EmbeddingEngine(tables_of(self.ids, dim, table), seed=seed)
        template = wide_table or Table(1, init=init.Constant(0.0))
        self.wide = EmbeddingEngine(
            {
                name: replace(table, name=f"wide.{table.name or name}")
                for name, table in tables_of(self.wide_ids, 1, template).items()
            },
            seed=seed,
        )
        self.net = mlp(self.numbers.width + dim * len(self.ids), hidden, 1, dropout=dropout)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Compute the logits of a batch.

        Args:
            batch: Columns by name.

        Returns:
            The logits, (B,).
        """
        embedded, weights = self.embeddings(batch), self.wide(batch)
        wide = torch.cat([weights[name] for name in self.wide_ids], 1).sum(1)
        deep = self.net(beside(self.numbers, batch, (embedded[name] for name in self.ids)))
        return wide + cast(Tensor, deep).squeeze(1)
