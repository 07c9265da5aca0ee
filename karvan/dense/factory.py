"""Where the dense parameters of a Trainer are to make their steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from karvan.dense.local import DenseHere
from karvan.distributed import Connection
from karvan.embedding import EmbeddingEngine


def make_stepping(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    engines: Sequence[EmbeddingEngine],
    connection: Connection,
    ahead: int,
) -> DenseHere:
    """Where this connection's mode has the dense parameters; servers are given them, a collective."""
    if connection.settings.mode != "async" or optimizer is None:
        return DenseHere(optimizer)
    from karvan.dense.remote import DenseAway  # with Flight, which others need not wait for

    away = DenseAway(model, optimizer, engines, connection, ahead)
    away.begin()
    return away
