"""`Layers`: linear layers with ReLU, which in mixed precision on a GPU take a third of the launches.

Torch's autocast casts every weight, bias and gradient by a kernel of its own, and ReLU is one more. The host
then takes longer to queue a layer than a GPU to compute it. Here one kernel casts all weights, and another
one all gradients, and ReLU is part of the product. The numbers are those of autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from karvan.torch_internals import addmm_relu, foreach_copy


class Layers(nn.Sequential):
    """nn.Linear, nn.ReLU and nn.Dropout, in this order, any number of times; the last may lack the ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        """The output for (B, width)."""
        if x.is_cuda and torch.is_autocast_enabled("cuda") and not torch.compiler.is_compiling():
            found = self._plain_layers()
            if found and x.dim() == 2 and x.dtype in (torch.float32, torch.get_autocast_dtype("cuda")):
                return mixed_layers(x, *found, torch.get_autocast_dtype("cuda"))
        return cast(Tensor, super().forward(x))  # type: ignore[no-untyped-call]

    def _plain_layers(self) -> tuple[list[nn.Linear], list[bool]] | None:
        """The linear layers, and whether a ReLU follows each; None if something else would happen, too."""
        linears: list[nn.Linear] = []
        relus: list[bool] = []
        for module in self:
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
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
    x: Tensor, linears: Sequence[nn.Linear], relus: Sequence[bool], dtype: torch.dtype
) -> Tensor:
    """The output of layers, computed in a dtype of 16 bits; relus: whether a ReLU follows each of them."""
    weights = [parameter for linear in linears for parameter in (linear.weight, linear.bias)]
    return _mixed_layers(x, tuple(relus), dtype, *weights)


class _MixedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, relus: tuple[bool, ...], dtype: torch.dtype, *weights: Tensor) -> Tensor:
        small = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        foreach_copy(small, weights)
        values = [x.to(dtype)]
        for weight, bias, relu in zip(small[::2], small[1::2], relus, strict=True):
            product = addmm_relu if relu else torch.addmm
            values.append(product(bias, values[-1], weight.t()))
        ctx.relus, ctx.dtype_of_x = relus, x.dtype
        ctx.weights = small[::2]
        ctx.save_for_backward(*values)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        values, made = ctx.saved_tensors, list[Tensor]()
        for layer in reversed(range(len(ctx.relus))):
            if ctx.relus[layer]:
                gradient = torch.ops.aten.threshold_backward(gradient, values[layer + 1], 0)
            made += [gradient.sum(0), gradient.t().mm(values[layer])]
            if layer or ctx.needs_input_grad[0]:
                gradient = gradient.mm(ctx.weights[layer])
        large = [torch.empty_like(each, dtype=torch.float32) for each in reversed(made)]
        foreach_copy(large, made[::-1])
        of_x = gradient.to(ctx.dtype_of_x) if ctx.needs_input_grad[0] else None
        return of_x, None, None, *large


# torch declares `apply` without types.
_mixed_layers = cast(Callable[..., Tensor], _MixedLayers.apply)
