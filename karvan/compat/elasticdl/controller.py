"""`create_elastic_controller`: data shards and steps of a loop of PyTorch, whose workers come and go.

Workers are those of `karvan run --as elasticdl train --job_command "python program.py" --num_workers 2`.
Their gradients are averaged by `karvan/train/elastic_loop.py`. Without a job there is one worker.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import default_collate

from karvan.argument_checks import check_counts
from karvan.compat.elasticdl.data_shards import DataShardService, RecordBatch, build_data_shard_service
from karvan.compat.unsupported import UsageError, require_default
from karvan.data import Split, open_files
from karvan.distributed import current
from karvan.train.elastic_loop import ElasticLoop

GLOBAL_BATCHES = "global_batches"
"""Where DistributedOptimizer notes how many batches a step has, if that does not follow the workers."""

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
        self._resume_epoch = 0
        self._computed: list[RecordBatch] = []  # batches of this worker that are not reported
        data_shard_service.while_waiting = self._wait

    @property
    def global_completed_batch_num(self) -> int:
        """How many batches all workers have trained, and those of epochs before `set_resume_epoch`."""
        before = self._resume_epoch * self.data_shard_service.get_minibatch_count_per_epoch()
        return before if self._loop is None else self._loop.batches

    def get_current_epoch(self) -> int:
        """How many epochs all workers have trained together, which all of them know at the same step."""
        service = self.data_shard_service
        if self._loop is None:
            return self._resume_epoch
        epoch = self._loop.samples // service.dataset_size
        return epoch if service.num_epochs is None else min(epoch, self._resume_epoch + service.num_epochs)

    def set_resume_epoch(self, epoch: int) -> None:
        """Let counts begin after so many epochs, whose model was loaded; num_epochs are those that follow."""
        if self._loop is not None:
            raise UsageError("set_resume_epoch comes before the first batch.")
        check_counts(0, epoch=epoch)
        self._resume_epoch = epoch

    def restore(self) -> None:
        """Drop the gradients of a batch. What workers say to each other is repaired in every step."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()

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
        """A function that makes a step, or computes a batch of it, and reports the batches of the step."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            loop, service = self._steps(), self.data_shard_service
            loop.begin(service.records_to_train)
            before = loop.computed
            result = function(*arguments, **options)
            if loop.computed != before + 1:
                raise UsageError(
                    "elastic_run expects a function that calls step() of the broadcast optimizer once, got "
                    f"{loop.computed - before} calls."
                )
            self._computed.append(service.take_batch())
            self._report()
            service.prefetch()
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
                self._report()
                if not self._steps().steps:
                    _log.warning("All records were trained before this worker has joined: it ends.")
                    raise SystemExit(0)
        finally:
            self.data_shard_service.close()

    def _steps(self) -> ElasticLoop:
        if self._loop is None:
            if self._model is None or self._optimizer is None:
                raise UsageError(
                    "Workers must name what they train together: call set_broadcast_model and "
                    "set_broadcast_optimizer before the first batch."
                )
            batches = getattr(self._optimizer, GLOBAL_BATCHES, None)
            self._loop = loop = ElasticLoop(self._model, self._optimizer, global_batches=batches)
            loop.batches = self.global_completed_batch_num
            loop.samples = self._resume_epoch * self.data_shard_service.dataset_size
        return self._loop

    def _wait(self) -> None:
        self._steps().take_part()
        self._report()

    def _report(self) -> None:
        """Report the batches that are in a step."""
        if self._computed and not self._steps().accumulated:
            self.data_shard_service.report([record for batch in self._computed for record in batch])
            self._computed = []


def create_elastic_controller(
    batch_size: int,
    num_epochs: int | None = None,
    dataset_size: int | None = None,
    shuffle: bool = False,
    shuffle_shards: bool = False,
) -> PyTorchAllReduceController:
    """A controller with its `data_shard_service`; see `DataShardService`."""
    require_group()
    service = build_data_shard_service(batch_size, num_epochs, dataset_size, shuffle, shuffle_shards)
    return PyTorchAllReduceController(service)


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    global_batch_num_per_step: int | None = None,
    fixed_global_batch_size: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer itself: the controller averages its gradients over the workers that are there.

    fixed_global_batch_size: a step has global_batch_num_per_step batches, by default WORKER_NUM, however
    many workers there are; `step()` returns without a step until they are computed. backward_passes_per_step
    and gradient_predivide_factor are for communication, and change no result.
    """
    require_group()
    require_default("compression", compression, None, "gradients are sent as float32: leave it out.")
    require_default("op", op, None, "gradients are averaged: leave it out.")
    workers = int(os.environ.get("WORKER_NUM") or 1)
    batches = workers if global_batch_num_per_step is None else global_batch_num_per_step
    check_counts(1, backward_passes_per_step=backward_passes_per_step, global_batch_num_per_step=batches)
    if fixed_global_batch_size:
        if batches < workers:
            raise UsageError(
                f"A step needs a batch of every worker: expected global_batch_num_per_step of at least "
                f"{workers}, the number of workers, got {batches}."
            )
        setattr(optimizer, GLOBAL_BATCHES, batches)
    if named_parameters is not None:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if parameters != {id(parameter) for _, parameter in named_parameters}:
            raise UsageError(
                "DistributedOptimizer expects the named parameters of its optimizer, got others."
            )
    return optimizer


class ElasticDataset(torch.utils.data.IterableDataset[Any]):
    """Batches of a data set's samples, shard by shard: `for batch in DataLoader(data, batch_size=None)`.

    Report each batch by `service.report_batch_done(len(labels))` before the next one. A batch has records of
    one shard; the last one of a shard may be short.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        data_shard_service: DataShardService,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._dataset = dataset
        self._service = data_shard_service
        self._collate = collate_fn

    def __iter__(self) -> Iterator[Any]:
        size = self._service.batch_size
        while (shard := self._service.fetch_shard()) is not None:
            numbers = shard.numbers()
            for first in range(0, len(numbers), size):
                yield self._collate([self._dataset[number] for number in numbers[first : first + size]])


def __getattr__(name: str) -> Any:
    if name == "ElasticImageFolder":
        return _image_folder()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


@cache
def _image_folder() -> type:
    """The class, which needs torchvision."""
    from torchvision.datasets import ImageFolder

    class ElasticImageFolder(ImageFolder):  # type: ignore[misc]
        """torchvision's ImageFolder; after `set_data_shard_service` its samples are those of records."""

        _data_shard_service: DataShardService | None = None

        def set_data_shard_service(self, data_shard_service: DataShardService) -> None:
            """Give the samples of the records that this service leases, whatever index is asked for."""
            self._data_shard_service = data_shard_service

        def __len__(self) -> int:
            return len(self.samples) if self._data_shard_service is None else sys.maxsize

        def __getitem__(self, index: int) -> Any:
            service = self._data_shard_service
            return super().__getitem__(index if service is None else service.fetch_record_index())

    return ElasticImageFolder


class RecordBlock(NamedTuple):
    """The records of a file: from `start` to `end`, counted over all files."""

    name: str
    start: int
    end: int


class RecordIOReader:
    """Reads records of files, whose numbers begin where those of the file before end."""

    def __init__(self, recordio_files: Sequence[str]) -> None:
        if isinstance(recordio_files, str):
            raise UsageError(f"RecordIOReader expects a list of files, got the text '{recordio_files}'.")
        self._sources = [
            open_files(name, "recordio", partitions=False, content="bytes") for name in recordio_files
        ]
        counts = [sum(part.records for part in source.parts()) for source in self._sources]
        bounds = pairwise(accumulate(counts, initial=0))
        self._blocks = [
            RecordBlock(str(name), *bound) for name, bound in zip(recordio_files, bounds, strict=True)
        ]

    def read_records(self, start: int, end: int) -> Iterator[bytes]:
        """The records from `start` to `end`."""
        for block, source in zip(self._blocks, self._sources, strict=True):
            first, last = max(start, block.start), min(end, block.end)
            if first < last:
                (part,) = source.parts()
                for batch in source.read(Split(part.path, first - block.start, last - first)):
                    yield from batch.column(0).to_pylist()
