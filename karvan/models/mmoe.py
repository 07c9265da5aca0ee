"""MMoE: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts",
2018, https://doi.org/10.1145/3219819.3220007.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from karvan.embedding import EmbeddingEngine
from karvan.models.parts import Names, Numbers, Tables, beside, mlp, names_in, tables_of


class MMoE(nn.Module):
    """MMoE: several tasks share embeddings and expert nets (Ma et al., 2018).

    Each task has a gate that mixes the experts.

    Args:
        numbers: The names of columns of numbers in a batch; a mapping of names to widths for columns of
            several numbers.
        ids: The names of columns of ids in a batch. Lists of ids are averaged.
        tasks: The names of the outputs.
        dim: The number of elements of a vector.
        experts: The number of expert nets.
        expert: The sizes of an expert's hidden layers.
        tower: The sizes of the hidden layers of the net that each task has after its mixture.
        dropout: The share of units of hidden layers that are dropped in training.
        table: A `kv.Table` as a template for all ids, or tables of some ids by name. By default, means of
            rows that start within ±1 / sqrt(dim).
        seed: The seed of new rows.

    Raises:
        ValueError: There are no tasks, no experts, or no layers in them.

    Example:
        >>> model = kv.models.MMoE([], ["user", "item"], tasks=["ctr", "cvr"], dim=8)
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([7, 8])}
        >>> sorted(model(batch))
        ['ctr', 'cvr']
    """

    def __init__(
        self,
        numbers: Names,
        ids: Sequence[str],
        tasks: Sequence[str],
        dim: int = 16,
        experts: int = 4,
        expert: Sequence[int] = (128, 64),
        tower: Sequence[int] = (32,),
        *,
        dropout: float = 0.0,
        table: Tables = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not tasks or isinstance(tasks, str) or experts < 1 or not expert:
            raise ValueError(
                f"MMoE expects tasks, experts and layers in them, got tasks {tasks!r}, {experts} experts "
                f"with layers {expert!r}."
            )
        self.ids, self.tasks = names_in(ids), list(tasks)
        self.numbers = Numbers(numbers)
        self.embeddings = EmbeddingEngine(tables_of(self.ids, dim, table), seed=seed)
        width = self.numbers.width + dim * len(self.ids)
        self.experts = nn.ModuleList(mlp(width, expert, dropout=dropout) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in tasks)
        self.towers = nn.ModuleList(mlp(expert[-1], tower, 1) for _ in tasks)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Compute the logits of each task.

        Args:
            batch: Columns by name.

        Returns:
            The logits by task, (B,).
        """
        embedded = self.embeddings(batch)
        x = beside(self.numbers, batch, (embedded[name] for name in self.ids))
        opinions = torch.stack([expert(x) for expert in self.experts], 2)  # (B, width, experts)
        towers = {}
        for task, gate, tower in zip(self.tasks, self.gates, self.towers, strict=True):
            shares = gate(x).softmax(1).unsqueeze(1)
            towers[task] = tower((opinions * shares).sum(2)).squeeze(1)
        return towers
