"""`ProgramModel`: a RecIS model within a `kv.Trainer`.

Karvan's Trainer calls a model with batches of its own kind, and RecIS's models take samples with
RaggedTensors and return their loss. Hooks of the module translate; calls with anything else pass unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from karvan.compat.recis.framework.hook_calls import HookCalls
from karvan.compat.recis.framework.metrics import get_log_metrics, restore_metrics
from karvan.compat.recis.io.dataset_base import DatasetBase
from karvan.compat.recis.ragged.tensor import to_karvan, to_recis
from karvan.data import Loader, merge
from karvan.ragged import Batch


class ProgramData:
    """A dataset of a program: its batches for Karvan, and those batches for the program."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.batches: Iterable[Any] = dataset.loader if isinstance(dataset, DatasetBase) else _Pairs(dataset)

    def present(self, batch: Mapping[str, Any]) -> Any:
        """A batch as the program knows it."""
        if isinstance(self._dataset, DatasetBase):
            return self._dataset.present(batch)
        return {name: to_recis(entry) for name, entry in batch.items()}

    def first(self, count: int | None) -> Iterable[Any]:
        """The first batches, or all of them."""
        if isinstance(self._dataset, DatasetBase):
            self._dataset.reset()
        return self.batches if count is None else _First(self.batches, count)

    def short_epochs(self, count: int) -> Iterable[Any]:
        """The first batches in each epoch; of a dataset of RecIS's with their position."""
        loader = self.batches
        return ShortEpochs(loader, count) if isinstance(loader, Loader) else _First(loader, count)


class _Pairs:
    """The batches of a dataset whose items are `(is_end, samples)`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Batch]:
        for is_end, samples in self._dataset:
            if is_end:
                getattr(self._dataset, "reset", lambda: None)()  # for the next epoch, as RecIS does
                return
            yield Batch({name: to_karvan(entry) for name, entry in samples.items()})


class _First:
    """The first batches of some."""

    def __init__(self, batches: Iterable[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._count)


class ShortEpochs:
    """The first batches of a loader in each epoch; their position is the loader's, with the epoch's count."""

    def __init__(self, loader: Loader, count: int) -> None:
        self._loader, self._count = loader, count
        self._epoch = self._taken = 0
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            self.start_epoch(self._epoch + 1)
        for batch in islice(self._loader, self._count - self._taken):
            self._taken += 1
            yield batch
        self._ended = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def start_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch."""
        self._loader.start_epoch(epoch)
        self._epoch, self._taken, self._ended = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {**self._loader.state_dict(), "short": [self._epoch, self._taken]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position, also to one of the loader itself, which is at the start of an epoch."""
        self._loader.load_state_dict(state)
        self._epoch, self._taken = state.get("short", [self._loader.epoch, 0])
        self._ended = False

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The positions of all ranks as one."""
        return {**merge(states), "short": max(state["short"] for state in states)}


class ProgramModel:
    """Translates the calls of a model while it is computed with the data of a program."""

    def __init__(self, model: nn.Module, calls: HookCalls) -> None:
        self._model = model
        self._calls = calls
        self._batch: Batch | None = None
        self._data: ProgramData | None = None
        self._metrics: dict[str, Any] = {}  # before a batch without samples
        self.evaluates_loss = True  # whether it returns its loss in evaluations, too

    @contextmanager
    def computing(self, data: ProgramData) -> Iterator[None]:
        """Within it, batches of this data reach the model as samples."""
        self._data = data
        hooks = [
            self._model.register_forward_pre_hook(self._before),
            self._model.register_forward_hook(self._after),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._data = None

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._batch = args[0] if args and isinstance(args[0], Batch) else None
        if self._batch is None or self._data is None:
            return None
        samples = self._data.present(self._batch)
        if module.training:
            self._calls.begin_training()
        if self._batch.samples:
            self._calls.begin_batch(samples, module.training)
        else:
            self._metrics = dict(get_log_metrics())
        return (samples,)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        batch, self._batch = self._batch, None
        if batch is None:
            return output
        if not batch.samples:
            restore_metrics(self._metrics)
        is_loss = isinstance(output, Tensor) and output.numel() == 1
        if not module.training:
            self.evaluates_loss = is_loss
            if batch.samples:
                self._calls.end_evaluated_batch(output)
            return torch.nan_to_num(output) if is_loss and not batch.samples else output
        if not is_loss:
            got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"A model of RecIS returns its loss in training: expected a tensor of one number, got {got}."
            )
        self._calls.end_training(output.detach() if batch.samples else None)
        # A rank whose data has ended computes batches without samples for the others: their mean is NaN.
        return output if batch.samples else torch.nan_to_num(output)


def model_loss(output: Any, batch: Any) -> Tensor:
    """The loss that the model has returned; 0 if an evaluation has returned something else."""
    return output if isinstance(output, Tensor) and output.numel() == 1 else torch.zeros(())
