"""`Layers`: linear layers with ReLU, which in mixed precision on a GPU take few launches.

Torch's autocast casts every weight, bias and gradient by a kernel of its own, and ReLU is one more. The host
then takes longer to queue a layer than a GPU to compute it. Here one kernel casts all weights, and another
one all gradients, and ReLU is part of the product. In training, layers whose input has the same shape again
are replayed as CUDA graphs (`LayerGraphs`). The numbers are those of autocast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from karvan.devices import record
from karvan.torch_internals import addmm_relu, foreach_copy

# The forward and the backward pass of linear layers with ReLU in 16 bits, as few torch calls.


def forward_pass(
    x: Tensor, weights: Sequence[Tensor], relus: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """The values before and after each layer, and the matrices in the dtype of `x`, which backward needs.

    weights: matrix and bias of each layer, in float32. relus: whether a ReLU follows each.
    """
    small = [torch.empty_like(weight, dtype=x.dtype) for weight in weights]
    foreach_copy(small, list(weights))
    values = [x]
    for weight, bias, relu in zip(small[::2], small[1::2], relus, strict=True):
        product = addmm_relu if relu else torch.addmm
        values.append(product(bias, values[-1], weight.t()))
    return values, small[::2]


def backward_pass(
    gradient: Tensor,
    values: Sequence[Tensor],
    matrices: Sequence[Tensor],
    relus: Sequence[bool],
    *,
    needs_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """The gradient of `x` in its dtype, if it is needed, and those of all weights in float32, as one tensor.

    values, matrices: of `forward_pass`. See `split` for the gradients of each weight.
    """
    outputs = list[Tensor]()
    for layer in reversed(range(len(relus))):
        if relus[layer]:
            gradient = torch.ops.aten.threshold_backward(gradient, values[layer + 1], 0)
        outputs += [gradient.sum(0), gradient.t().mm(values[layer])]
        if layer or needs_x:
            gradient = gradient.mm(matrices[layer])
    outputs.reverse()
    flat = torch.empty(sum(output.numel() for output in outputs), dtype=torch.float32, device=gradient.device)
    foreach_copy(split(flat, [output.shape for output in outputs]), outputs)
    return gradient if needs_x else None, flat


def split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Parts of a tensor, one after the other, with these shapes."""
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# `LayerGraphs`: the passes of `Layers` as CUDA graphs, so that the host queues each by one call.
#
# A graph reads and writes memory of its own: values of the forward pass stay there until their backward pass.
# While such a pass is to come, another forward pass runs without the graph.


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
            type(weight) is nn.Parameter for weight in weights
        ):
            return None
        stream = torch.cuda.current_stream(x.device).cuda_stream
        kind = _Kind(x.shape, x.dtype, x.requires_grad, relus, dtype, x.device, stream)
        if kind in self._recorded:
            layers = self._recorded[kind]
            if layers is None or layers.addresses == _addresses(weights):
                return layers if layers is not None and layers.free else None
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


class Layers(nn.Sequential):
    """nn.Linear, nn.ReLU and nn.Dropout, in this order, any number of times; the last may lack the ReLU."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._graphs = LayerGraphs()

    def forward(self, x: Tensor) -> Tensor:
        """The output for (B, width)."""
        if x.is_cuda and torch.is_autocast_enabled("cuda") and not torch.compiler.is_compiling():
            layers = self._plain_layers()
            if layers and x.dim() == 2 and x.dtype in (torch.float32, torch.get_autocast_dtype("cuda")):
                return mixed_layers(x, *layers, torch.get_autocast_dtype("cuda"), self._graphs)
        return cast(Tensor, super().forward(x))  # type: ignore[no-untyped-call]

    def _plain_layers(self) -> tuple[list[nn.Linear], list[bool]] | None:
        """The linear layers, and whether a ReLU follows each; None if something else would happen, too."""
        linears: list[nn.Linear] = []
        relus: list[bool] = []
        for module in self:
            if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)):
                return None
            if module._backward_pre_hooks:
                return None
            if type(module) is nn.Linear and module.bias is not None and module.weight.dtype is torch.float32:
                linears.append(module)
                relus.append(False)
            elif type(module) is nn.ReLU and linears and not relus[-1]:
                relus[-1] = True
            elif type(module) is not nn.Dropout or (module.training and module.p):
                return None
        return linears, relus


def mixed_layers(
    x: Tensor,
    linears: Sequence[nn.Linear],
    relus: Sequence[bool],
    dtype: torch.dtype,
    graphs: LayerGraphs | None = None,
) -> Tensor:
    """The output of layers, computed in a dtype of 16 bits.

    relus: whether a ReLU follows each layer. graphs: those of these layers, which are used in training.
    """
    weights = [parameter for linear in linears for parameter in (linear.weight, linear.bias)]
    if graphs is not None and torch.is_grad_enabled():
        graphed = graphs.take(x, weights, tuple(relus), dtype)
        if graphed is not None:
            return _graphed_layers(x, graphed, *weights)
    return _mixed_layers(x, tuple(relus), dtype, *weights)


class _MixedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, relus: tuple[bool, ...], dtype: torch.dtype, *weights: Tensor) -> Tensor:
        values, ctx.weights = forward_pass(x.to(dtype), weights, relus)
        ctx.relus, ctx.dtype_of_x, ctx.shapes = relus, x.dtype, [weight.shape for weight in weights]
        ctx.save_for_backward(*values)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_x, of_weights = backward_pass(
            gradient, ctx.saved_tensors, ctx.weights, ctx.relus, needs_x=ctx.needs_input_grad[0]
        )
        of_x = None if of_x is None else of_x.to(ctx.dtype_of_x)
        return of_x, None, None, *split(of_weights, ctx.shapes)


class _GraphedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, graphed: GraphedLayers, *weights: Tensor) -> Tensor:
        ctx.graphed, ctx.dtype_of_x = graphed, x.dtype
        output, ctx.turn = graphed.forward(x)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_x, of_weights = ctx.graphed.backward(ctx.turn, gradient, ctx.dtype_of_x)
        return of_x, None, *of_weights


# torch declares `apply` without types.
_mixed_layers = cast(Callable[..., Tensor], _MixedLayers.apply)
_graphed_layers = cast(Callable[..., Tensor], _GraphedLayers.apply)
