"""DIN: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", 2018,
https://arxiv.org/abs/1706.06978.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from karvan.embedding import EmbeddingEngine
from karvan.models.parts import Names, Numbers, Tables, beside, mlp, names_in, tables_of
from karvan.ragged import Padded


class Attention(nn.Module):
    """How much each entry of a history matters for a target: a small net over both and their match.

    As in the paper the weights are not normalised, so that a strong interest counts for more than a weak one.
    """

    def __init__(self, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.net = mlp(4 * dim, hidden, 1)

    def forward(self, target: Tensor, history: Padded) -> Tensor:
        """The weighted sum of the history, (B, dim); zeros where it is empty."""
        values = history.values
        target = target.unsqueeze(1).expand_as(values)
        weights: Tensor = self.net(torch.cat([values, target, values - target, values * target], 2))
        return (values * weights * history.mask.unsqueeze(2)).sum(1)


class DIN(nn.Module):
    """Sums each history, weighted by what matters for its target, with a net over these and all other inputs.

    sequences: histories by name, each with the id among `ids` that it is a history of: {"history": "item"}. A
    history shares the rows of its target. length: how many entries of a history count, from the first; None
    for all. table: of the ids, see `kv.models.parts.tables_of`.
    """

    def __init__(
        self,
        numbers: Names,
        ids: Sequence[str],
        sequences: Mapping[str, str],
        dim: int = 16,
        hidden: Sequence[int] = (256, 128),
        *,
        attention: Sequence[int] = (64, 32),
        length: int | None = None,
        dropout: float = 0.0,
        table: Tables = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.ids, self.sequences = names_in(ids), dict(sequences)
        self.numbers = Numbers(numbers)
        tables = tables_of(self.ids, dim, table)
        for name, target in self.sequences.items():
            if target not in self.ids or name in self.ids:
                raise ValueError(
                    "DIN expects histories of one of the ids, and not among them; "
                    f"got '{name}' of '{target}', and ids {', '.join(self.ids)}."
                )
            shared = tables[target].name or target
            tables[name] = replace(tables[target], name=shared, combiner="sequence", length=length)
        self.embeddings = EmbeddingEngine(tables, seed=seed)
        self.attention = nn.ModuleList(Attention(dim, attention) for _ in self.sequences)
        width = self.numbers.width + dim * (len(self.ids) + len(self.sequences))
        self.net = mlp(width, hidden, 1, dropout=dropout)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """The logits, (B,)."""
        embedded = self.embeddings(batch)
        interests = [
            attend(embedded[target], embedded[name])
            for attend, (name, target) in zip(self.attention, self.sequences.items(), strict=True)
        ]
        vectors = [*(embedded[name] for name in self.ids), *interests]
        return cast(Tensor, self.net(beside(self.numbers, batch, vectors))).squeeze(1)
