"""Chooses where the dense parameters of a Trainer are updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from karvan.dense.local import LocalDense
from karvan.distributed import Connection
from karvan.embedding import EmbeddingEngine


def make_stepping(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    engines: Sequence[EmbeddingEngine],
    connection: Connection,
    prefetch: int,
) -> LocalDense:
    """Where this connection's mode has the dense parameters; servers are given them, a collective."""
    if optimizer is None or not connection.settings.mode.dense_on_servers:
        return LocalDense(optimizer)
    from karvan.dense.remote import RemoteDense  # with Flight, which others need not wait for

    away = RemoteDense(model, optimizer, engines, connection, prefetch)
    away.begin()
    return away
