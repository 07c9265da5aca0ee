"""`create_elastic_controller`: data shards and steps of a loop of PyTorch with one worker.

Several workers would have to average their gradients while they come and go. Karvan does that for a model
(`train --distribution_strategy AllreduceStrategy`, or `kv.Trainer` in an elastic job), not inside of a loop
that is written by hand, so more than one worker is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from karvan.compat.elasticai_api.common.data_shard_service import DataShardService, build_data_shard_service
from karvan.compat.unsupported import UsageError


def require_one_worker() -> None:
    """Raise if the environment says that there are several workers."""
    for name in ("WORKER_NUM", "WORLD_SIZE"):
        if int(os.environ.get(name) or 1) > 1:
            raise UsageError(
                f"A loop with an elastic controller has one worker here, got {name}={os.environ[name]}: for "
                "several, describe the model to `karvan run --as elasticdl train --distribution_strategy "
                "AllreduceStrategy`, or use kv.Trainer in an elastic job. Loops without a controller can "
                "share data by build_data_shard_service."
            )


class PyTorchAllReduceController:
    """Calls the function of a step, and reports its batch."""

    def __init__(self, data_shard_service: DataShardService) -> None:
        require_one_worker()
        self.data_shard_service = data_shard_service
        self.global_completed_batch_num = 0
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def set_broadcast_model(self, model: nn.Module) -> None:
        """The model of the loop."""
        if not isinstance(model, nn.Module):
            raise UsageError(f"set_broadcast_model expects a torch.nn.Module, got {type(model).__name__}.")
        self._model = model

    def set_broadcast_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer of the loop."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"set_broadcast_optimizer expects a torch optimizer, got {type(optimizer).__name__}."
            )
        self._optimizer = optimizer

    def elastic_run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes a step, and then reports its batch."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.global_completed_batch_num += 1
            self.data_shard_service.report_batch_done()
            return result

        return run

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around the loop; what was not reported is given back at its end."""
        try:
            yield
        finally:
            self.data_shard_service.close()


def create_elastic_controller(
    batch_size: int,
    num_epochs: int | None = 1,
    dataset_size: int | None = None,
    shuffle: bool = False,
    shuffle_shards: bool = False,
) -> PyTorchAllReduceController:
    """A controller with its `data_shard_service`; see `DataShardService`."""
    require_one_worker()
    service = build_data_shard_service(batch_size, num_epochs, dataset_size, shuffle, shuffle_shards)
    return PyTorchAllReduceController(service)
