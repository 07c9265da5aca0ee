"""Tensors of different types and shapes in one buffer of bytes.

Each begins at a multiple of 256 bytes, as those that torch allocates on a GPU do, so that kernels read them
equally fast. A tensor that occurs more than once, such as offsets that several columns share, is in the
buffer once, and its occurrences share a tensor afterwards, too.

Tensors of one dtype are side by side, because torch then makes all of them in one call: for the tens of
columns of a batch, a few calls for each tensor would take longer than the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

ALIGNMENT = 256


class Packing:
    """The positions of tensors in a buffer of `nbytes` bytes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            self._groups.setdefault(tensor.dtype, []).append(tensor)
        self.nbytes = sum(_room(tensor) for group in self._groups.values() for tensor in group)

    def fill(self, buffer: Tensor) -> None:
        """Copy the tensors into a buffer on the CPU.

        One call of torch for each dtype: each call lets other threads take the interpreter's lock, and who
        wants it back waits.
        """
        start = 0
        for dtype, tensors in self._groups.items():
            end = start + sum(map(_room, tensors))
            parts = []
            for tensor in tensors:
                parts.append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
                if gap := _gap(tensor):
                    parts.append(_padding(dtype, gap))
            torch.cat(parts, out=buffer[start:end].view(dtype))
            start = end

    def unpack(self, buffer: Tensor) -> dict[int, Tensor]:
        """The tensors in a buffer, or in a copy of it on any device, by the `id` of those that were packed.

        They share the memory of the buffer. To autograd they are tensors of their own: writing to one of them
        changes the version of no other.
        """
        return {id(tensor): place for tensor, place in self._places(buffer)}

    def _places(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each of the tensors, and the part of a buffer for it."""
        start = 0
        for dtype, tensors in self._groups.items():
            end = start + sum(map(_room, tensors))
            sizes = [size for each in tensors for size in (each.numel(), _gap(each))]
            parts = torch.unsafe_split_with_sizes(buffer[start:end].view(dtype), sizes)[::2]
            for tensor, part in zip(tensors, parts, strict=True):
                yield tensor, part if tensor.dim() == 1 else part.view(tensor.shape)
            start = end


def can_pack(tensor: Tensor) -> bool:
    """Whether it is plain values in main memory, without a gradient."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad


@lru_cache(1024)
def _padding(dtype: torch.dtype, count: int) -> Tensor:
    """What fills a gap."""
    return torch.zeros(count, dtype=dtype)


def _room(tensor: Tensor) -> int:
    """The bytes from the beginning of a tensor to that of the next."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _gap(tensor: Tensor) -> int:
    """The elements that are free after a tensor."""
    return _room(tensor) // tensor.element_size() - tensor.numel()
