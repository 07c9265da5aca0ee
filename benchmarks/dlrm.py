"""The DLRM that readers of data are held against: how many rows a second it trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import karvan as kv

DIM = 16


class DLRM(nn.Module):
    """Embeddings of ids, a net over the numbers, and a net over all of these.

    Without dot products between the vectors: torch's batched products of small matrices are so slow on some
    machines that nothing else would be measured, and a fast step is what a loader has to keep up with.
    """

    def __init__(self, numbers: Sequence[str], ids: Sequence[str]) -> None:
        super().__init__()
        self._numbers, self._ids = list(numbers), list(ids)
        self.embeddings = kv.EmbeddingEngine({name: kv.Table(DIM) for name in ids})
        self.bottom = nn.Sequential(nn.Linear(len(numbers), 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((len(ids) + 1) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: kv.Batch) -> Tensor:
        """Return the logits of a click."""
        dense = self.bottom(torch.stack([batch[name] for name in self._numbers], 1))
        embedded = self.embeddings(batch)
        return self.top(torch.cat([dense, *(embedded[name] for name in self._ids)], 1)).squeeze(1)


def training_pass(
    batches: Sequence[kv.Batch], numbers: Sequence[str], ids: Sequence[str]
) -> Callable[[], None]:
    """Return a pass of training over batches in memory."""
    model = DLRM(numbers, ids)
    sparse = kv.optim.Adagrad(model.embeddings, lr=0.05)
    dense = torch.optim.Adagrad(model.parameters(), lr=0.05)

    def run() -> None:
        for batch in batches:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
            loss.backward()
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()

    return run
