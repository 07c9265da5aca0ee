"""DLRM: Naumov et al., "Deep Learning Recommendation Model", 2019, https://arxiv.org/abs/1906.00091."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from karvan.embedding import EmbeddingEngine
from karvan.models.parts import Names, Numbers, Tables, mlp, names_in, pairwise_dots, tables_of


class DLRM(nn.Module):
    """DLRM: the dot products of all pairs of vectors, and a net over them (Naumov et al., 2019).

    A bottom net makes a vector of the numbers. A top net sees it and how all pairs of vectors match.

    Args:
        numbers: The names of columns of numbers in a batch; a mapping of names to widths for columns of
            several numbers.
        ids: The names of columns of ids in a batch. Lists of ids are averaged.
        dim: The number of elements of a vector.
        bottom: The sizes of the bottom net's hidden layers; it ends in `dim`. Without numbers there is no
            bottom net.
        top: The sizes of the top net's hidden layers; it ends in one logit.
        dropout: The share of units of hidden layers that are dropped in training.
        table: A `kv.Table` as a template for all ids, or tables of some ids by name. By default, means of
            rows that start within ±1 / sqrt(dim).
        seed: The seed of new rows.

    Raises:
        ValueError: There are neither numbers nor two ids.

    Example:
        >>> model = kv.models.DLRM([], ids=["user", "item"], dim=8)
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([7, 8])}
        >>> model(batch).shape
        torch.Size([2])
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
        """Compute the logits of a batch.

        Args:
            batch: Columns by name.

        Returns:
            The logits, (B,).
        """
        embedded = self.embeddings(batch)
        vectors = [embedded[name] for name in self.ids]
        first = None if self.bottom is None else self.bottom(self.numbers(batch))
        pairs = pairwise_dots(vectors if first is None else [first, *vectors], first)
        return cast(Tensor, self.top(pairs)).squeeze(1)
