"""The DLRM that readers of data are held against: how many rows a second it trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import karvan as kv

DIM = 16


class DLRM(nn.Module):
    """Embeddings of ids, a net over the numbers, all their dot products, and a net over these."""

    def __init__(self, numbers: Sequence[str], ids: Sequence[str]) -> None:
        super().__init__()
        self._numbers, self._ids = list(numbers), list(ids)
        self.embeddings = kv.EmbeddingEngine({name: kv.Table(DIM) for name in ids})
        self.bottom = nn.Sequential(nn.Linear(len(numbers), 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        vectors = len(ids) + 1
        self.register_buffer("_pairs", torch.tril_indices(vectors, vectors, -1))
        inputs = DIM + vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: kv.Batch) -> Tensor:
        """Return the logits of a click."""
        dense = self.bottom(torch.stack([batch[name] for name in self._numbers], 1))
        embedded = self.embeddings(batch)
        vectors = torch.stack([dense, *(embedded[name] for name in self._ids)], 1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = self._pairs
        return self.top(torch.cat([dense, products[:, rows, columns]], 1)).squeeze(1)


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
