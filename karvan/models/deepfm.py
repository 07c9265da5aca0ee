"""DeepFM: Guo et al., "A Factorization-Machine based Neural Network for CTR Prediction", 2017,
https://arxiv.org/abs/1703.04247.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from karvan.embedding import EmbeddingEngine
from karvan.models.parts import Names, Numbers, Tables, beside, mlp, names_in, tables_of, widened


class DeepFM(nn.Module):
    """DeepFM: a linear model, all pairwise matches of vectors, and a net (Guo et al., 2017).

    The net sees the same vectors. A row holds the id's weight in the linear model beside its vector, so a
    table has dim + 1 columns: with dim=8, the banner, checkpoints and `karvan inspect` show dim 9. Each
    number has a weight and a vector, too, which it multiplies.

    Args:
        numbers: The names of columns of numbers in a batch; a mapping of names to widths for columns of
            several numbers.
        ids: The names of columns of ids in a batch. Lists of ids are averaged.
        dim: The number of elements of a vector.
        hidden: The sizes of the net's hidden layers.
        dropout: The share of units of hidden layers that are dropped in training.
        table: A `kv.Table` as a template for all ids, or tables of some ids by name. By default, means of
            rows that start within ±1 / sqrt(dim).
        seed: The seed of new rows.

    Example:
        >>> model = kv.models.DeepFM([], ids=["user", "item"], dim=8)
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([7, 8])}
        >>> model(batch).shape
        torch.Size([2])
    """

    def __init__(
        self,
        numbers: Names,
        ids: Sequence[str],
        dim: int = 16,
        hidden: Sequence[int] = (256, 128),
        *,
        dropout: float = 0.0,
        table: Tables = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.ids = names_in(ids)
        self.numbers = Numbers(numbers)
        # Products of all pairs go straight into the logit: rows that start large would be noise there.
        tables = widened(tables_of(self.ids, dim, table, spread=0.01), 1)
        self.embeddings = EmbeddingEngine(tables, seed=seed)
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.Parameter(torch.zeros(self.numbers.width))
        self.factors = nn.Parameter(0.1 * torch.randn(self.numbers.width, dim))
        self.net = mlp(self.numbers.width + dim * len(self.ids), hidden, 1, dropout=dropout)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Compute the logits of a batch.

        Args:
            batch: Columns by name.

        Returns:
            The logits, (B,).
        """
        embedded = self.embeddings(batch)
        rows = torch.stack([embedded[name] for name in self.ids], 1)
        weights, vectors = rows[:, :, 0], rows[:, :, 1:]
        sums, squares = vectors.sum(1), vectors.square().sum(1)
        logits = weights.sum(1) + self.bias
        if self.numbers.width:
            numbers = self.numbers(batch)
            logits = logits + numbers @ self.weights
            sums = sums + numbers @ self.factors
            squares = squares + numbers.square() @ self.factors.square()
        matches = 0.5 * (sums.square() - squares).sum(1)  # of all pairs, by (Σ v)² = Σ v² + 2 Σ pairs
        deep = self.net(beside(self.numbers, batch, [vectors.flatten(1)]))
        return logits + matches + cast(Tensor, deep).squeeze(1)
