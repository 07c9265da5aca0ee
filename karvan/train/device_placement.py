"""Moves batches and embedding vectors to the model's device.

A store in memory takes its ids on the CPU, on whatever device the rest of the model is. So columns that
become its ids stay on the CPU; all others go to the device, and so do its vectors. A store on the model's GPU
takes its ids there, and nothing comes back. Without a GPU nothing happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from karvan.devices import CopiedBatch, copy_columns, exact_device, hold_until_used, tensors_of
from karvan.embedding import EmbeddingEngine
from karvan.features import FeatureEngine
from karvan.ragged import Batch, IndexedRows, NestedRagged, Padded, Ragged
from karvan.train.losses import Check, no_check
from karvan.train.optimizer_step import engines_of
from karvan.train.types import Pair, as_batch, same

_log = logging.getLogger("karvan.train")
_CPU = torch.device("cpu")


@dataclass(eq=False)
class Placement:
    """For a model on the CPU: batches are where they are needed already.

    prepare: called with every batch. engines: they group the ids of batches in advance. check: of labels and
    weights.
    """

    model: nn.Module
    device: torch.device
    prepare: Callable[[Any], Any]
    engines: Sequence[EmbeddingEngine]
    check: Check = no_check

    def __post_init__(self) -> None:
        self._checks_first = self.prepare is same  # otherwise it may make the labels

    def feed_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context in which a feed takes and places batches, on its own thread.

        It is called on the thread that computes, before the feed begins.
        """
        return nullcontext

    def checked_by(self, data: Any) -> AbstractContextManager[Any]:
        """Within it, data whose batches arrive on a GPU checks labels before they do: a check there waits."""
        check_batches = getattr(data, "check_batches", None)
        if check_batches is None or not self._checks_first:
            return nullcontext()
        checked: AbstractContextManager[Any] = check_batches(self.check)
        return checked

    def place(self, batch: Any, training: bool | None = None) -> Any:
        """Move a batch and prepare it, for training or for an evaluation; runs on the feed's thread.

        Labels of a batch for training are checked here, where it costs the step no time; before it is moved,
        unless the preparation may make them: a check on a GPU waits.
        """
        batch = as_batch(batch)
        checks = bool(training) and self.check not in getattr(batch, "checks", ())
        if checks and self._checks_first:
            self.check(batch)
        prepared = self._moved(batch)
        if not self._checks_first:
            prepared = as_batch(self.prepare(prepared))
            if checks:
                self.check(prepared)
        for engine in self.engines:
            engine.prepare(prepared, training=training)
        return prepared

    def _moved(self, batch: Any) -> Any:
        """The batch with its columns where they are needed."""
        return batch

    def forget(self) -> None:
        """Drop batches that were prepared for training and will not be used."""
        for engine in self.engines:
            engine.forget_prepared()

    def receive(self, batch: Any) -> None:
        """Must be called before computing with a batch, on the same thread."""

    def forward(self) -> AbstractContextManager[None]:
        """The context of a forward of the model."""
        return nullcontext()


class CudaPlacement(Placement):
    """For a model on a GPU: copies use a separate stream, so they do not wait for the computation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._host = host_columns(self.model, self.device)
        self._warned = False
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._placed: dict[int, torch.cuda.Event] = {}  # when a batch is ready, by its id

    @override
    def feed_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """What the feed's thread computes is on the stream of the copies."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # batches may be on the GPU already
        return self._on_stream

    def _on_stream(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    @override
    def place(self, batch: Any, training: bool | None = None) -> Any:
        batch = as_batch(batch)
        current = torch.cuda.current_stream(self.device)
        if current != self._stream and not _on_cpu(batch):  # outside of a feed: it may not be ready yet
            self._stream.wait_stream(current)
        with self._on_stream():
            prepared = super().place(batch, training)
            self._placed[id(prepared)] = self._stream.record_event()
            return prepared

    @override
    def _moved(self, batch: Any) -> Any:
        # The data may have copied it to the device already; not for columns that the CPU needs.
        if isinstance(batch, CopiedBatch) and batch.device == self.device and not self._host:
            return batch
        device_columns = {name: entry for name, entry in batch.items() if name not in self._host}
        moved = copy_columns(device_columns, self.device)
        columns = {
            name: moved[name] if name in moved else self._on_host(name, entry)
            for name, entry in batch.items()
        }
        if isinstance(batch, Pair):
            return batch.with_columns(columns)
        return batch.with_entries(columns) if isinstance(batch, Batch) else columns

    def _on_host(self, name: str, entry: Any) -> Any:
        """A column whose table or features are on the CPU; the feed waits here for one that is not."""
        if _on_cpu({name: entry}):
            return entry
        if not self._warned:
            self._warned = True
            _log.warning(
                "Column '%s' is on a GPU, but becomes ids or features on the CPU, so it is copied back. "
                "Read the data without device=; the Trainer then copies the columns that the GPU needs.",
                name,
            )
        return entry.to("cpu")

    @override
    def receive(self, batch: Any) -> None:
        """Waits for the copies, and holds their memory until they were used."""
        current = torch.cuda.current_stream(self.device)
        ready = self._placed.pop(id(batch), None)
        if ready is None:  # a batch that is computed again
            current.wait_stream(self._stream)
        else:  # and not for the batches after it
            current.wait_event(ready)
        hold_until_used(batch.values(), current)

    @override
    def forget(self) -> None:
        super().forget()
        self._placed.clear()

    @contextmanager
    @override
    def forward(self) -> Iterator[None]:
        """Engines on the CPU take ids from anywhere and give vectors to the device.

        Those on the device need nothing, unless features are computed on the CPU.
        """
        hooks = []
        for engine in engines_of(self.model):
            if engine.store.device != self.device:
                hooks.append(engine.register_forward_pre_hook(_ids_to(_CPU)))
                hooks.append(engine.register_forward_hook(self._vectors_to_device))
            elif self._host:
                hooks.append(engine.register_forward_pre_hook(_ids_to(self.device)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _vectors_to_device(self, module: nn.Module, args: Any, outputs: dict[str, Any]) -> dict[str, Any]:
        return {name: _moved(output, self.device) for name, output in outputs.items()}


def make_placement(
    model: nn.Module,
    device: torch.device,
    prepare: Callable[[Any], Any],
    engines: Sequence[EmbeddingEngine],
    check: Check = no_check,
) -> Placement:
    """The placement for a model's device."""
    kind = CudaPlacement if device.type == "cuda" else Placement
    return kind(model, device, prepare, engines, check)


def device_of(model: nn.Module) -> torch.device:
    """The device that a model is on: that of its first parameter."""
    return next((parameter.device for parameter in model.parameters()), _CPU)


def target_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The requested device, with its index; without one, that of the tables on a GPU, or of the model."""
    tables = {engine.store.device for engine in engines_of(model)} - {_CPU}
    if device is None:
        current = device_of(model)
        return tables.pop() if current == _CPU and len(tables) == 1 else current
    where = exact_device(device)
    if where.type == "cpu" and tables:
        raise ValueError(
            f"device={str(device)!r} expects tables in memory, but the model has some on "
            f"{', '.join(sorted(map(str, tables)))}: leave device out, and the model is moved there, or "
            'create it after kv.connect("memory").'
        )
    return where


def host_columns(model: nn.Module, device: torch.device) -> set[str]:
    """The columns that stay on the CPU for a model on this device: ids and features of stores on the CPU.

    If all engines of the model are on the device, so are all columns, those of a FeatureEngine included.
    """
    engines = engines_of(model)
    on_host = [engine for engine in engines if engine.store.device != device]
    if engines and not on_host:
        return set()
    names = {feature for engine in on_host for feature in engine.features}
    for module in model.modules():
        if isinstance(module, FeatureEngine):
            names.update(name for feature in module.features for name in feature.columns or (feature.name,))
    return names


def _ids_to(
    device: torch.device,
) -> Callable[[nn.Module, tuple[Mapping[str, Any], ...]], tuple[dict[str, Any], ...]]:
    def hook(module: nn.Module, args: tuple[Mapping[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        assert isinstance(module, EmbeddingEngine)
        features = module.features
        return (
            {name: _moved(entry, device) if name in features else entry for name, entry in args[0].items()},
        )

    return hook


def _moved(entry: Any, device: torch.device) -> Any:
    if isinstance(entry, Padded):
        return Padded(entry.values.to(device), entry.mask.to(device))
    return entry.to(device) if isinstance(entry, Tensor | Ragged | NestedRagged | IndexedRows) else entry


def _on_cpu(batch: Mapping[str, Any]) -> bool:
    return all(tensor.is_cpu for entry in batch.values() for tensor in tensors_of(entry))
