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
    """Several tasks share embeddings and expert nets; each task has a gate that mixes the experts.

    tasks: the names of the outputs. expert, tower: sizes of the hidden layers of an expert, and of the
    net that each task has after its mixture. table: see `kv.models.parts.tables_of`.
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
        """The logits of each task, (B,)."""
        embedded = self.embeddings(batch)
        x = beside(self.numbers, batch, (embedded[name] for name in self.ids))
        opinions = torch.stack([expert(x) for expert in self.experts], 2)  # (B, width, experts)
        made = {}
        for task, gate, tower in zip(self.tasks, self.gates, self.towers, strict=True):
            shares = gate(x).softmax(1).unsqueeze(1)
            made[task] = tower((opinions * shares).sum(2)).squeeze(1)
        return made
