"""Chooses where the dense parameters of a Trainer are updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from karvan.dense.communication import DenseCommunication
from karvan.dense.periodic_averaging import PeriodicAveraging
from karvan.dense.step_policies import LocalDense
from karvan.distributed import Connection
from karvan.embedding import EmbeddingEngine


def make_stepping(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    engines: Sequence[EmbeddingEngine],
    connection: Connection,
    prefetch: int,
    communication: DenseCommunication,
) -> LocalDense:
    """The steps of dense parameters, local or on servers by the connection's mode; a collective.

    If they are on servers, this sends the parameters there, unless trainers come and go; if ranks step alone,
    they get those of rank 0.
    """
    if optimizer is None:
        return LocalDense(optimizer)
    if not connection.settings.mode.dense_on_servers:
        if communication.average_every == 1 or connection.world_size == 1:
            return LocalDense(optimizer)
        averaging = PeriodicAveraging(model, optimizer, connection, communication.average_every)
        averaging.begin()
        return averaging
    from karvan.dense.remote import (
        ElasticDense,  # imports Arrow Flight, which takes a while
        RemoteDense,
    )

    make = RemoteDense if connection.group is None else ElasticDense
    remote = make(model, optimizer, engines, connection, prefetch)
    remote.begin()
    return remote
