"""The forward and the backward pass of linear layers with ReLU in 16 bits, as few torch calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from karvan.torch_internals import addmm_relu, foreach_copy


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
    made = list[Tensor]()
    for layer in reversed(range(len(relus))):
        if relus[layer]:
            gradient = torch.ops.aten.threshold_backward(gradient, values[layer + 1], 0)
        made += [gradient.sum(0), gradient.t().mm(values[layer])]
        if layer or needs_x:
            gradient = gradient.mm(matrices[layer])
    made.reverse()
    flat = torch.empty(sum(each.numel() for each in made), dtype=torch.float32, device=gradient.device)
    foreach_copy(split(flat, [each.shape for each in made]), made)
    return gradient if needs_x else None, flat


def split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Parts of a tensor, one after the other, with these shapes."""
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
