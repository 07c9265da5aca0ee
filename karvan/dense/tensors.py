"""Dense arrays from messages: converted to tensors and checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.native import _native
from karvan.torch_internals import foreach_norm

_LARGE = 1 << 20  # elements for which one reduction is as fast as that of many tensors together

Array: TypeAlias = Tensor | NDArray[Any]


def dense_tensor(name: str, array: Array, copy: bool) -> Tensor:
    """A contiguous float32 tensor on the CPU."""
    if isinstance(array, np.ndarray):
        # Torch warns of read-only memory, such as that of messages, and does not support negative strides.
        array = torch.from_numpy(array if array.flags.carray else array.copy())
    if not isinstance(array, Tensor) or not array.is_floating_point():
        kind = array.dtype if isinstance(array, Tensor) else type(array).__name__
        raise ValueError(f"'{name}' must be an array of floats, got {kind}.")
    if array.layout is not torch.strided:
        array = array.to_dense()
    array = array.detach().to("cpu", torch.float32, copy=copy, memory_format=torch.contiguous_format)
    return array.contiguous()


def expect_number(what: str, value: int) -> None:
    """Raise unless it is a valid version or sequence number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{what} must be a number from 0 on, got {value!r}.")


def expect_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Raise unless gradients are for existing parameters and have their shapes."""
    for name, gradient in gradients.items():
        if name not in parameters:
            raise ValueError(
                f"Expected gradients for some of the parameters {_names(parameters)}, got one for '{name}'."
            )
        if gradient.shape != parameters[name].shape:
            raise ValueError(
                f"The gradient for '{name}' must have shape {list(parameters[name].shape)}, "
                f"got {list(gradient.shape)}."
            )


def _names(parameters: Mapping[str, Any]) -> str:
    names = [f"'{name}'" for name in list(parameters)[:8]]
    return (", ".join(names) or "none") + (", …" if len(parameters) > 8 else "")


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether no element is an infinity or a NaN."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    dense = [g for g in dense if g.numel()]  # torch has no largest magnitude of nothing
    if not dense:
        return True
    if all(g.is_cpu and g.dtype is torch.float32 and g.is_contiguous() for g in dense):
        return _native.all_finite([g.data_ptr() for g in dense], [g.numel() for g in dense])
    return bool(torch.isfinite(largest_magnitude(dense)))


def largest_magnitude(gradients: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of gradients that are not empty, on their device; NaN if an element is NaN.

    Unlike a sum, it cannot overflow.
    """
    joined = _neighbours(gradients)
    few = [tensor for tensor in joined if tensor.numel() < _LARGE]
    norms = [torch.linalg.vector_norm(tensor, math.inf) for tensor in joined if tensor.numel() >= _LARGE]
    norms += foreach_norm(few, math.inf) if few else ()
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    return torch.stack(norms).amax()


def _neighbours(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, those that follow each other in one allocation as one, which takes fewer calls.

    Gradients of features that are computed together are such neighbours.
    """
    groups: list[tuple[Tensor, int]] = []  # the first of some neighbours, and the elements of all
    end, memory, dtype = 0, 0, None
    for tensor in tensors:
        first, size = tensor, tensor.numel()
        begin, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        is_plain = tensor.is_contiguous()
        if is_plain and begin == end and storage == memory and tensor.dtype is dtype:
            first, before = groups.pop()
            size += before
        groups.append((first, size))
        end, memory, dtype = begin + tensor.nbytes if is_plain else 0, storage, tensor.dtype
    return [first if size == first.numel() else first.as_strided((size,), (1,)) for first, size in groups]
