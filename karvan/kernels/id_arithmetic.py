"""Arithmetic of ids, which are unsigned 64-bit numbers in int64 tensors: remainders and hash stacks."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.kernels.hashing import hash_to_16
from karvan.kernels.jit import Ids, Integer, kernel, launch, tl

_BLOCK = 1024


@kernel
def remainder_kernel(ids: Ids, modulus: Integer, out: Ids, count: Integer, block: tl.constexpr) -> None:
    """The remainders of `block` ids a program."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    rest = tl.load(ids + at, mask=inside, other=0).to(tl.uint64) % modulus.to(tl.uint64)
    tl.store(out + at, rest.to(tl.int64), mask=inside)


@kernel
def each_remainder_kernel(
    ids: Ids, moduli: Ids, step: Integer, out: Ids, count: Integer, block: tl.constexpr
) -> None:
    """The same by moduli in memory: one for each id with step 1, one for all with step 0."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    modulus = tl.load(moduli + at * step, mask=inside, other=1).to(tl.uint64)
    rest = tl.load(ids + at, mask=inside, other=0).to(tl.uint64) % modulus
    tl.store(out + at, rest.to(tl.int64), mask=inside)


@kernel
def hash_stack_kernel(
    ids: Ids, rounds: Integer, size: Integer, out: Ids, count: Integer, block: tl.constexpr
) -> None:
    """The rows of `block` ids a program: the hash of the id, the hash of this hash, and so on."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    key = tl.load(ids + at, mask=inside, other=0).to(tl.uint64)
    eight = (key & 0) + 8
    buckets = size.to(tl.uint64)
    first = out + at * rounds
    turn = rounds.to(tl.int64) & 0
    while turn < rounds:
        key = hash_to_16(key, key, eight)
        tl.store(first + turn, (key % buckets).to(tl.int64) + turn * size, mask=inside)
        turn += 1


def remainders(ids: Tensor, modulus: int | Tensor) -> Tensor:
    """`karvan.ids.mod`."""
    if isinstance(modulus, int):
        ids = ids.contiguous()
        out = torch.empty_like(ids)
        launch(remainder_kernel, ids.numel(), _BLOCK, out, ids, modulus)
        return out
    shape = torch.broadcast_shapes(ids.shape, modulus.shape)  # type: ignore[no-untyped-call]
    ids = ids.expand(shape).contiguous()
    step = int(modulus.numel() != 1)
    moduli = modulus.expand(ids.shape).contiguous() if step else modulus
    out = torch.empty_like(ids)
    launch(each_remainder_kernel, ids.numel(), _BLOCK, out, ids, moduli, step)
    return out


def hash_stacks(ids: Tensor, rounds: int, size: int) -> Tensor:
    """`karvan.ids.hash_stack`."""
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, rounds), dtype=torch.int64, device=ids.device)
    launch(hash_stack_kernel, ids.numel(), 256, out, ids, rounds, size)
    return out
