"""`LayerGraphs`: the passes of `Layers` as CUDA graphs, so that the host queues each by one call.

A graph reads and writes memory of its own: values of the forward pass stay there until their backward pass.
While such a pass is to come, another forward pass runs without the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from karvan.devices.recording import record
from karvan.models.layer_passes import backward_pass, forward_pass, split

_MOST = 4  # shapes of one net that are recorded
_SEEN = 64  # shapes that are remembered


class Turn:
    """One use of a graph: a forward pass, whose backward pass may come as long as this object lives."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False  # whether the backward pass was queued


class _Kind(NamedTuple):
    """What a graph depends on, beside the addresses of the weights."""

    shape: torch.Size
    dtype_of_x: torch.dtype
    needs_x: bool
    relus: tuple[bool, ...]
    dtype: torch.dtype
    device: torch.device
    stream: int


class GraphedLayers:
    """The graphs of layers for one shape of their input, and the memory that these use."""

    def __init__(self, kind: _Kind, weights: Sequence[Tensor]) -> None:
        self.addresses = _addresses(weights)
        self._shapes = [weight.shape for weight in weights]
        self._turn: weakref.ref[Turn] | None = None
        self._x = torch.empty(kind.shape, dtype=kind.dtype, device=kind.device)
        stream, pool = _recording_stream(kind.device, kind.stream), torch.cuda.graph_pool_handle()

        def run_forward() -> None:
            self._values, self._matrices = forward_pass(self._x, weights, kind.relus)

        def run_backward() -> None:
            self._of_x, self._of_weights = backward_pass(
                self._gradient, self._values, self._matrices, kind.relus, needs_x=kind.needs_x
            )

        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            self._forward = record(stream, run_forward, pool)
            self._gradient = torch.empty_like(self._values[-1])
            self._backward = record(stream, run_backward, pool)

    @property
    def free(self) -> bool:
        """Whether no first backward pass can come for the last forward pass."""
        turn = None if self._turn is None else self._turn()
        return turn is None or turn.done

    def forward(self, x: Tensor) -> tuple[Tensor, Turn]:
        """The output for `x`, and what `backward` needs to know."""
        turn = Turn()
        self._turn = weakref.ref(turn)
        self._x.copy_(x)
        self._forward.replay()
        return self._values[-1].clone(), turn

    def backward(
        self, turn: Turn, gradient: Tensor, dtype_of_x: torch.dtype
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The gradients of `x`, if it needs one, and of the weights."""
        if self._turn is None or self._turn() is not turn:
            raise RuntimeError(
                "Backward was called a second time for an output of `Layers`, but the next forward pass "
                "has replaced the values that it needs. Sum the losses, and call backward once."
            )
        turn.done = True
        self._gradient.copy_(gradient)
        self._backward.replay()
        of_x = None if self._of_x is None else self._of_x.to(dtype_of_x, copy=True)
        return of_x, split(self._of_weights.clone(), self._shapes)


class LayerGraphs:
    """The graphs of one net, which records an input's shape when it comes a second time."""

    def __init__(self) -> None:
        self._seen: set[_Kind] = set()
        self._recorded: dict[_Kind, GraphedLayers | None] = {}  # None: there was not enough memory

    def take(
        self, x: Tensor, weights: Sequence[Tensor], relus: tuple[bool, ...], dtype: torch.dtype
    ) -> GraphedLayers | None:
        """Graphs for this input; None if it should run without."""
        if torch.cuda.is_current_stream_capturing() or not all(
            type(each) is nn.Parameter for each in weights
        ):
            return None
        stream = torch.cuda.current_stream(x.device).cuda_stream
        kind = _Kind(x.shape, x.dtype, x.requires_grad, relus, dtype, x.device, stream)
        if kind in self._recorded:
            found = self._recorded[kind]
            if found is None or found.addresses == _addresses(weights):
                return found if found is not None and found.free else None
            self._recorded.clear()  # the weights have moved
            self._seen.clear()
        if kind not in self._seen:
            if len(self._seen) < _SEEN:
                self._seen.add(kind)
            return None
        if len(self._recorded) >= _MOST:
            return None
        try:
            self._recorded[kind] = GraphedLayers(kind, weights)
        except torch.OutOfMemoryError:
            self._recorded[kind] = None
        return self._recorded[kind]

    def __deepcopy__(self, memo: object) -> LayerGraphs:
        return LayerGraphs()

    def __reduce__(self) -> tuple[type[LayerGraphs], tuple[()]]:
        return LayerGraphs, ()


def _addresses(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in weights)


@cache
def _recording_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """That of recordings of a stream's work: cuBLAS has memory for each stream, which graphs go on to use."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
