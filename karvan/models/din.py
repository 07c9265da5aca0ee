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
    """DIN: sums each history, weighted by what matters for its target (Zhou et al., 2018).

    A net sees these sums and all other inputs. A history shares the rows of its target.

    Args:
        numbers: The names of columns of numbers in a batch; a mapping of names to widths for columns of
            several numbers.
        ids: The names of columns of ids in a batch. Lists of ids are averaged.
        sequences: Histories by name, each with the id among `ids` that it is a history of: `{"history":
            "item"}`.
        dim: The number of elements of a vector.
        hidden: The sizes of the net's hidden layers.
        attention: The sizes of the hidden layers of the net that weights entries of a history.
        length: How many entries of a history count, from the first; None for all.
        dropout: The share of units of hidden layers that are dropped in training.
        table: A `kv.Table` as a template for all ids, or tables of some ids by name. By default, means of
            rows that start within ±1 / sqrt(dim).
        seed: The seed of new rows.

    Raises:
        ValueError: A history is of none of the ids, or is among them.

    Example:
        >>> model = kv.models.DIN([], ["item"], sequences={"history": "item"}, dim=8)
        >>> batch = {
        ...     "item": torch.tensor([7, 8]),
        ...     "history": kv.Ragged.from_lists([[1, 2], [7]]),
        ... }
        >>> model(batch).shape
        torch.Size([2])
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
        """Compute the logits of a batch.

        Args:
            batch: Columns by name.

        Returns:
            The logits, (B,).
        """
        embedded = self.embeddings(batch)
        interests = [
            attend(embedded[target], embedded[name])
            for attend, (name, target) in zip(self.attention, self.sequences.items(), strict=True)
        ]
        vectors = [*(embedded[name] for name in self.ids), *interests]
        return cast(Tensor, self.net(beside(self.numbers, batch, vectors))).squeeze(1)
