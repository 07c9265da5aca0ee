"""Moves batches and embedding vectors to the model's device.

A store in memory takes its ids on the CPU, on whatever device the rest of the model is. So columns that
become ids stay on the CPU; all others go to the device, and so do an engine's vectors. Without a GPU nothing
happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from karvan.embedding import EmbeddingEngine
from karvan.features import FeatureEngine
from karvan.ragged import Batch, NestedRagged, Padded, Ragged
from karvan.train.checks.common_mistakes import check_device
from karvan.train.checks.label_values import Check, no_check
from karvan.train.feed.feed import same


class Placement:
    """For a model on the CPU: batches are where they are needed already."""

    def __init__(
        self, prepare: Callable[[Any], Any], engines: Sequence[EmbeddingEngine], check: Check = no_check
    ) -> None:
        self._call = prepare
        self._engines = engines
        self._check = check

    def place(self, batch: Any, training: bool | None = None) -> Any:
        """Move a batch and prepare it, for training or for an evaluation; runs on the feed's thread.

        Labels of a batch for training are checked here, where it costs the step no time.
        """
        return self._prepare(batch, training, checks=bool(training))

    def _prepare(self, batch: Any, training: bool | None, checks: bool) -> Any:
        prepared = self._call(batch)
        if checks:
            self._check(prepared)
        for engine in self._engines:
            engine.prepare(prepared, training=training)
        return prepared

    def forget(self) -> None:
        """Drop batches that were prepared for training and will not be used."""
        for engine in self._engines:
            engine.forget_prepared()

    def receive(self, batch: Any) -> None:
        """Must be called before computing with a batch, on the same thread."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of a forward of the model."""
        yield


class CudaPlacement(Placement):
    """For a model on a GPU: copies use a separate stream, so they do not wait for the computation."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        prepare: Callable[[Any], Any],
        engines: Sequence[EmbeddingEngine],
        check: Check = no_check,
    ) -> None:
        super().__init__(prepare, engines, check)
        self._checks_first = prepare is same  # on the CPU then, so that nothing waits for the GPU
        self._device = device
        self._model = model
        self._host = set(_host_columns(model))
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def place(self, batch: Any, training: bool | None = None) -> Any:
        """See `Placement.place`."""
        if training and self._checks_first:
            self._check(batch)
        moved = {}
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for name, entry in batch.items():
                if name not in self._host:
                    entry = entry.pin_memory() if _on_cpu(entry) else entry
                    entry = entry.to(self._device, non_blocking=True)
                moved[name] = entry
        placed = Batch(moved) if isinstance(batch, Batch) else moved
        return self._prepare(placed, training, checks=bool(training) and not self._checks_first)

    def receive(self, batch: Any) -> None:
        """See `Placement.receive`: waits for the copies, and holds their memory until they were used."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for entry in batch.values():
            for tensor in _tensors(entry):
                if tensor.is_cuda:
                    tensor.record_stream(current)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """See `Placement.forward`: engines take ids from anywhere and give vectors to the device."""
        hooks = []
        for module in self._model.modules():
            if isinstance(module, EmbeddingEngine):
                hooks.append(module.register_forward_pre_hook(_ids_to_cpu))
                hooks.append(module.register_forward_hook(self._vectors_to_device))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _vectors_to_device(self, module: nn.Module, args: Any, outputs: dict[str, Any]) -> dict[str, Any]:
        return {name: _moved(output, self._device) for name, output in outputs.items()}


def make_placement(
    model: nn.Module,
    device: torch.device,
    prepare: Callable[[Any], Any],
    engines: Sequence[EmbeddingEngine],
    check: Check = no_check,
) -> Placement:
    """The placement for a device; `engines` group the ids of batches in advance, `check` checks labels."""
    if device.type == "cuda":
        return CudaPlacement(model, device, prepare, engines, check)
    return Placement(prepare, engines, check)


def target_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The requested device, with its index, or the one that the model is on.

    With its index, because other threads have their own current GPU, by default the first.
    """
    if device is None:
        return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    exact = check_device(device)
    if exact.type == "cuda" and exact.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return exact


def _host_columns(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        if isinstance(module, EmbeddingEngine):
            yield from module.features
        elif isinstance(module, FeatureEngine):
            for feature in module.features:
                yield from feature.columns or (feature.name,)


def _ids_to_cpu(module: nn.Module, args: tuple[Mapping[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    assert isinstance(module, EmbeddingEngine)
    batch = args[0]
    cpu = torch.device("cpu")
    return (
        {name: _moved(entry, cpu) if name in module.features else entry for name, entry in batch.items()},
    )


def _moved(entry: Any, device: torch.device) -> Any:
    if isinstance(entry, Padded):
        return Padded(entry.values.to(device), entry.mask.to(device))
    return entry.to(device) if isinstance(entry, Tensor | Ragged | NestedRagged) else entry


def _on_cpu(entry: Any) -> bool:
    return all(tensor.is_cpu for tensor in _tensors(entry))


def _tensors(entry: Any) -> list[Tensor]:
    if isinstance(entry, Tensor):
        return [entry]
    if isinstance(entry, Ragged):
        return [t for t in (entry.values, entry.offsets, entry.weights) if t is not None]
    return [entry.values, entry.inner, entry.outer] if isinstance(entry, NestedRagged) else []
