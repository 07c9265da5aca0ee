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
    """A linear model over ids and crosses, which remembers, and a net over vectors, which generalises.

    wide: ids whose weights are added up, usually crosses (`kv.Feature("a_x_b").cross("a", "b")`); an id may
    be in both parts. Weights start at 0 in tables of one column named "wide.NAME", in a separate engine,
    `model.wide`, so that they can have a separate optimizer, such as `kv.optim.FTRL(model.wide)`.
    table: of the deep part, see `kv.models.parts.tables_of`; wide_table: the template of wide tables.
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
                name: replace(each, name=f"wide.{each.name or name}")
                for name, each in tables_of(self.wide_ids, 1, template).items()
            },
            seed=seed,
        )
        self.net = mlp(self.numbers.width + dim * len(self.ids), hidden, 1, dropout=dropout)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """The logits, (B,)."""
        embedded, weights = self.embeddings(batch), self.wide(batch)
        wide = torch.cat([weights[name] for name in self.wide_ids], 1).sum(1)
        deep = self.net(beside(self.numbers, batch, (embedded[name] for name in self.ids)))
        return wide + cast(Tensor, deep).squeeze(1)
