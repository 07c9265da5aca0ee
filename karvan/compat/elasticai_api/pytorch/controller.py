"""`create_elastic_controller`: data shards and steps of a loop of PyTorch, whose workers come and go.

Workers are those of `karvan run --as elasticdl train --job_command "python program.py" --num_workers 2`.
Their gradients are averaged by `karvan/train/elastic_loop.py`. Without a job there is one worker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from karvan.compat.elasticai_api.common.data_shard_service import DataShardService, build_data_shard_service
from karvan.compat.unsupported import UsageError
from karvan.distributed import current
from karvan.train.elastic_loop import ElasticLoop

_log = logging.getLogger("karvan.train")


def require_group() -> None:
    """Raise if the environment says that there are several workers, but they are no group."""
    for name in ("WORKER_NUM", "WORLD_SIZE"):
        if int(os.environ.get(name) or 1) > 1 and current().group is None:
            raise UsageError(
                f"A loop with an elastic controller has one worker here, got {name}={os.environ[name]}: for "
                'several, run it by `karvan run --as elasticdl train --job_command "python program.py" '
                "--num_workers 2`. Loops without a controller can share data by build_data_shard_service."
            )


class PyTorchAllReduceController:
    """Calls the function of a step, whose gradients are averaged over workers, and reports its batch."""

    def __init__(self, data_shard_service: DataShardService) -> None:
        require_group()
        self.data_shard_service = data_shard_service
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._loop: ElasticLoop | None = None
        data_shard_service.while_waiting = self._wait

    @property
    def global_completed_batch_num(self) -> int:
        """How many batches all workers have trained."""
        return 0 if self._loop is None else self._loop.batches

    def set_broadcast_model(self, model: nn.Module) -> None:
        """The model of the loop; workers that join get its parameters."""
        if not isinstance(model, nn.Module):
            raise UsageError(f"set_broadcast_model expects a torch.nn.Module, got {type(model).__name__}.")
        self._model = model

    def set_broadcast_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer of the loop; workers that join get its state."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"set_broadcast_optimizer expects a torch optimizer, got {type(optimizer).__name__}."
            )
        self._optimizer = optimizer

    def elastic_run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes a step, and then reports its batch."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            loop = self._steps()
            loop.begin()
            before = loop.steps
            result = function(*arguments, **options)
            if loop.steps != before + 1:
                raise UsageError(
                    "elastic_run expects a function that calls step() of the broadcast optimizer once, got "
                    f"{loop.steps - before} calls."
                )
            self.data_shard_service.report_batch_done()
            return result

        return run

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around the loop; at its end what was not reported is given back, and workers wait for each other.

        A worker that joins when all records are trained, and finds no other, ends the program here: it has
        nothing of what they have trained.
        """
        try:
            yield
            if current().group is not None or self._loop is not None:
                self._steps().finish()
                if not self._steps().steps:
                    _log.warning("All records were trained before this worker has joined: it ends.")
                    raise SystemExit(0)
        finally:
            self.data_shard_service.close()

    def _steps(self) -> ElasticLoop:
        if self._loop is None:
            if self._model is None or self._optimizer is None:
                raise UsageError(
                    "Workers train together what they name: call set_broadcast_model and "
                    "set_broadcast_optimizer before the first batch."
                )
            self._loop = ElasticLoop(self._model, self._optimizer)
        return self._loop

    def _wait(self) -> None:
        self._steps().take_part()


def create_elastic_controller(
    batch_size: int,
    num_epochs: int | None = 1,
    dataset_size: int | None = None,
    shuffle: bool = False,
    shuffle_shards: bool = False,
) -> PyTorchAllReduceController:
    """A controller with its `data_shard_service`; see `DataShardService`."""
    require_group()
    service = build_data_shard_service(batch_size, num_epochs, dataset_size, shuffle, shuffle_shards)
    return PyTorchAllReduceController(service)
