"""`Layers`: linear layers with ReLU, which in mixed precision on a GPU take few launches.

Torch's autocast casts every weight, bias and gradient by a kernel of its own, and ReLU is one more. The host
then takes longer to queue a layer than a GPU to compute it. Here one kernel casts all weights, and another
one all gradients, and ReLU is part of the product. In training, layers whose input has the same shape again
are replayed as CUDA graphs (`LayerGraphs`). The numbers are those of autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from karvan.models.layer_graphs import GraphedLayers, LayerGraphs
from karvan.models.layer_passes import backward_pass, forward_pass, split


class Layers(nn.Sequential):
    """nn.Linear, nn.ReLU and nn.Dropout, in this order, any number of times; the last may lack the ReLU."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._graphs = LayerGraphs()

    def forward(self, x: Tensor) -> Tensor:
        """The output for (B, width)."""
        if x.is_cuda and torch.is_autocast_enabled("cuda") and not torch.compiler.is_compiling():
            found = self._plain_layers()
            if found and x.dim() == 2 and x.dtype in (torch.float32, torch.get_autocast_dtype("cuda")):
                return mixed_layers(x, *found, torch.get_autocast_dtype("cuda"), self._graphs)
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
