"""Keeps the dense parameters of several ranks equal.

`Parallel` does nothing; `Averaged` averages gradients by torch's DistributedDataParallel, in the way that a
`Reduction` says. The model itself stays as it is: checkpoints, callbacks and evaluations see it without the
wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from karvan.dense.communication import DenseCommunication
from karvan.distributed import Connection
from karvan.train.losses import nothing_of
from karvan.train.pair import model_input
from karvan.train.step.gradient_reduction import Reduction, make_reduction


class Parallel:
    """For a model of one process, or one that has nothing to average."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.reduction = Reduction()

    def forward(self, batch: Any) -> Any:
        """A training forward."""
        return self._model(model_input(batch))

    def begin(self, output: Any, loss: Tensor) -> Tensor:
        """The tensor to compute gradients from."""
        return loss

    def passing(self, last: bool) -> AbstractContextManager[Any]:
        """The context of a forward and of its backward; gradients are averaged in a step's last pass."""
        return nullcontext()


class Averaged(Parallel):
    """Parameters start as those of rank 0; after a step's last pass they have the mean of all gradients."""

    def __init__(self, model: nn.Module, connection: Connection, communication: DenseCommunication) -> None:
        super().__init__(model)
        self._connection = connection
        self._shared = DistributedDataParallel(
            _Rehearsal(model), find_unused_parameters=communication.find_unused_parameters
        )
        # Torch rearranges gradients after the first pass, in the order in which they came, and the bits of
        # sums depend on positions. After a rehearsal, a fit that resumes has the sums of one never stopped.
        # Where it looks for parameters that take no part, it does not rearrange anything.
        if not communication.find_unused_parameters:
            self._shared(None).backward()
            model.zero_grad()
        self.reduction = make_reduction(communication, model)
        self.reduction.register(self._shared)

    @override
    def forward(self, batch: Any) -> Any:
        return self._shared(model_input(batch))

    @override
    def begin(self, output: Any, loss: Tensor) -> Tensor:
        """Torch expects that every head takes part, even one without a loss."""
        return loss + nothing_of(output) if isinstance(output, Mapping) and len(output) > 1 else loss

    @contextmanager
    @override
    def passing(self, last: bool) -> Iterator[None]:
        """An error of torch's collectives names the rank that is missing."""
        try:
            with nullcontext() if last else self._shared.no_sync():
                yield
        except RuntimeError as error:
            explained = self._connection.explained(error)
            if explained is error:
                raise
            raise explained from error


class _Rehearsal(nn.Module):
    """A model that can be called without a batch, for gradients of zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        if batch is None:
            return (
                torch.stack([each.sum() for each in self.model.parameters() if each.requires_grad]).sum() * 0
            )
        return self.model(batch)


def make_parallel(model: nn.Module, connection: Connection, communication: DenseCommunication) -> Parallel:
    """The wrapper for a model of these ranks; a collective.

    In mode async servers hold the parameters, and with average_every ranks step alone.
    """
    trained = any(parameter.requires_grad for parameter in model.parameters())
    averages = connection.world_size > 1 and connection.joint_steps and communication.average_every == 1
    return Averaged(model, connection, communication) if averages and trained else Parallel(model)
