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
    """The steps of dense parameters, local or on servers by the connection's mode; a collective.

    If they are on servers, this sends the parameters there.
    """
    if optimizer is None or not connection.settings.mode.dense_on_servers:
        return LocalDense(optimizer)
    from karvan.dense.remote import RemoteDense  # imports Arrow Flight, which takes a while

    remote = RemoteDense(model, optimizer, engines, connection, prefetch)
    remote.begin()
    return remote
