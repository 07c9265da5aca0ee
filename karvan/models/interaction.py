"""Dot products of all pairs of a sample's vectors, as in DLRM.

For float32 this is native code on the CPU and a kernel on a GPU: on some machines torch's batched products of
small matrices take thirty times as long, on a GPU the gradient of choosing pairs takes longer than all the
rest, and vectors need not be copied side by side first. Other cases use torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from karvan import kernels, native
from karvan.native import _native

_MOST_VECTORS = 64  # of a sample on a GPU: a kernel holds its vectors and products in shared memory


def pairwise_dots(vectors: Tensor | Sequence[Tensor], first: Tensor | None = None) -> Tensor:
    """Compute the dot products of all pairs of a sample's vectors.

    Pairs come in the order (1, 0), (2, 0), (2, 1), (3, 0), …. Half precision is computed in float32.

    Args:
        vectors: (B, n, dim), or n tensors (B, dim), which may be slices of wider ones.
        first: (B, e), which becomes the first columns of the result.

    Returns:
        (B, n (n - 1) / 2), after the columns of `first`.

    Example:
        >>> vectors = torch.tensor([[[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]]])
        >>> kv.models.pairwise_dots(vectors)
        tensor([[2., 0., 3.]])
    """
    listed = list(vectors.unbind(1)) if isinstance(vectors, Tensor) else list(vectors)
    _check(listed, first)
    if first is None:
        first = listed[0][:, :0]
    if any(t.dtype is not torch.float32 for t in (first, *listed)):
        dtype = torch.float64 if any(t.dtype is torch.float64 for t in listed) else torch.float32
        same = first is listed[0]
        listed = [t.to(dtype) for t in listed]
        first = listed[0] if same else first.to(dtype)
    if first.dtype is torch.float32:
        small = 1 < len(listed) <= _MOST_VECTORS and not torch.compiler.is_compiling()
        if small and all(map(kernels.on_gpu, (first, *listed))):
            return _pairs_on_gpu(first, *listed)
        if all(t.is_cpu for t in (first, *listed)):
            return _pairs(first, *(t if t.stride(1) == 1 else t.contiguous() for t in listed))
    with torch.autocast(first.device.type, enabled=False):
        return _with_torch(first, torch.stack(listed, 1))


def _with_torch(first: Tensor, vectors: Tensor) -> Tensor:
    n = vectors.shape[1]
    row, column = torch.tril_indices(n, n, -1, device=vectors.device)
    return torch.cat([first, torch.bmm(vectors, vectors.transpose(1, 2))[:, row, column]], 1)


class _Pairs(torch.autograd.Function):
    @staticmethod
    def forward(first: Tensor, *vectors: Tensor) -> Tensor:
        samples, dim = vectors[0].shape
        extra = first.shape[1]
        out = native.empty(samples, extra + len(vectors) * (len(vectors) - 1) // 2)
        if extra:
            out[:, :extra] = first
        if len(vectors) > 1 and samples:
            _native.interact(*_addresses(vectors), samples, dim, out.data_ptr() + 4 * extra, out.stride(0))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.extra = inputs[0].shape[1]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        vectors: tuple[Tensor, ...] = ctx.saved_tensors
        samples, dim = vectors[0].shape
        if gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        vectors_ = native.empty(samples, len(vectors), dim)
        if vectors_.numel():
            address = gradient.data_ptr() + 4 * ctx.extra
            _native.interact_backward(
                *_addresses(vectors), samples, dim, address, gradient.stride(0), vectors_.data_ptr()
            )
        return gradient[:, : ctx.extra], *vectors_.unbind(1)


class _PairsOnGPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, *vectors: Tensor) -> Tensor:
        from karvan.kernels.pairs import evenly_spaced, pairs

        lead, others = vectors[0], vectors[1:]
        if lead.stride(1) != 1:
            lead = lead.contiguous()
        if not evenly_spaced(others):
            others = torch.stack(others).unbind()
        ctx.extra = extra = first.shape[1]
        ctx.save_for_backward(lead, *others)
        n = len(vectors)
        out = torch.empty(len(first), extra + n * (n - 1) // 2, dtype=torch.float32, device=first.device)
        if extra:
            out[:, :extra] = first
        pairs(lead, others, out[:, extra:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        from karvan.kernels.pairs import pairs_backward

        lead, *others = ctx.saved_tensors
        if gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        gradients = pairs_backward(lead, others, gradient[:, ctx.extra :])
        return gradient[:, : ctx.extra], *gradients.unbind()


# torch declares `apply` without types.
_pairs = cast(Callable[..., Tensor], _Pairs.apply)
_pairs_on_gpu = cast(Callable[..., Tensor], _PairsOnGPU.apply)


def _addresses(vectors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return [t.data_ptr() for t in vectors], [t.stride(0) for t in vectors]


def _check(vectors: list[Tensor], first: Tensor | None) -> None:
    if not vectors:
        raise ValueError("pairwise_dots expects at least one vector for each sample, got none.")
    shape = tuple(vectors[0].shape)
    for tensor in vectors:
        if tensor.dim() != 2 or tuple(tensor.shape) != shape:
            raise ValueError(
                f"pairwise_dots expects vectors of one shape (B, dim), got {shape} and {tuple(tensor.shape)}."
            )
    if first is not None and (first.dim() != 2 or first.shape[0] != shape[0]):
        raise ValueError(f"pairwise_dots expects first of shape ({shape[0]}, e), got {tuple(first.shape)}.")
