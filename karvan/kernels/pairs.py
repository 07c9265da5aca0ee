"""Dot products of all pairs of a sample's vectors on a GPU, and their gradients.

A program has a few samples. The products of one are a small matrix product, of which the part below the
diagonal is written; nothing else is. Vector 0 has an address of its own; the others are equally far from each
other, as an engine's outputs are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from karvan.kernels.jit import Floats, Integer, Stride, device_function, kernel, launch, tl

_SAMPLES = 8  # of a program
_MOST_COLUMNS = 128  # of the vectors that are multiplied at once


@device_function
def _vectors(
    lead: Floats,
    others: Floats,
    lead_stride: Stride,
    spacing: Stride,
    stride: Stride,
    sample: Integer,
    samples: Integer,
    first: Integer,
    n: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> Floats:
    """Columns from `first` on of a sample's vectors."""
    number = tl.arange(0, rows)[:, None]
    column = first + tl.arange(0, columns)[None, :]
    mask = column < tl.where(sample < samples, dim, 0)
    lead_values = tl.load(lead + sample * lead_stride + column, mask=mask, other=0.0)
    pointer = others + (number - 1).to(tl.int64) * spacing + sample * stride + column
    rest = tl.load(pointer, mask=mask & (number > 0) & (number < n), other=0.0)
    return tl.where(number == 0, lead_values, rest)


@kernel
def pairs_kernel(
    lead: Floats,
    others: Floats,
    lead_stride: Stride,
    spacing: Stride,
    stride: Stride,
    out_stride: Stride,
    out: Floats,
    samples: Integer,
    n: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The products of the pairs (i, j), j < i, of each sample."""
    i = tl.arange(0, rows)[:, None]
    j = tl.arange(0, rows)[None, :]
    pair = i * (i - 1) // 2 + j
    for at in range(0, block):
        sample = tl.program_id(0).to(tl.int64) * block + at
        present = tl.where(sample < samples, n, 0)  # vectors
        products = tl.zeros([rows, rows], tl.float32)
        for first in range(0, dim, columns):
            vectors = _vectors(
                lead, others, lead_stride, spacing, stride, sample, samples, first, n, dim, rows, columns
            )
            products = tl.dot(vectors, tl.trans(vectors), products, input_precision="tf32x3")
        tl.store(out + sample * out_stride + pair, products, mask=(j < i) & (i < present))


@kernel
def pairs_backward_kernel(
    lead: Floats,
    others: Floats,
    lead_stride: Stride,
    spacing: Stride,
    stride: Stride,
    gradient: Floats,
    gradient_stride: Stride,
    out: Floats,
    samples: Integer,
    n: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The gradients of all vectors, which `out` has one vector after the other: (n, samples, dim)."""
    i = tl.arange(0, rows)[:, None]
    j = tl.arange(0, rows)[None, :]
    larger = tl.maximum(i, j)
    pair = larger * (larger - 1) // 2 + tl.minimum(i, j)
    for at in range(0, block):
        sample = tl.program_id(0).to(tl.int64) * block + at
        present = tl.where(sample < samples, n, 0)  # vectors
        of_pairs = tl.load(
            gradient + sample * gradient_stride + pair, mask=(i != j) & (larger < present), other=0.0
        )
        for first in range(0, dim, columns):
            vectors = _vectors(
                lead, others, lead_stride, spacing, stride, sample, samples, first, n, dim, rows, columns
            )
            product = tl.dot(of_pairs, vectors, input_precision="tf32x3")
            column = first + tl.arange(0, columns)[None, :]
            pointer = out + (i.to(tl.int64) * samples + sample) * dim + column
            tl.store(pointer, product, mask=(i < present) & (column < dim))


def pairs(lead: Tensor, others: Sequence[Tensor], out: Tensor) -> None:
    """Write the products of all pairs of `lead` and `others`, (B, dim) float32, into the columns of `out`."""
    launch(
        pairs_kernel, len(lead), _SAMPLES, out, *_places(lead, others), out.stride(0), **_shape(lead, others)
    )


def pairs_backward(lead: Tensor, others: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """The gradients of `lead` and `others`, (n, B, dim), from those of their products."""
    gradients = torch.empty(len(others) + 1, *lead.shape, dtype=torch.float32, device=lead.device)
    places = _places(lead, others)
    launch(
        pairs_backward_kernel,
        len(lead),
        _SAMPLES,
        gradients,
        *places,
        gradient,
        gradient.stride(0),
        **_shape(lead, others),
    )
    return gradients


def evenly_spaced(vectors: Sequence[Tensor]) -> bool:
    """Whether tensors (B, dim) are equally far from each other in memory, with rows that are dense."""
    first = vectors[0]
    if len(vectors) == 1:
        return first.stride(1) == 1
    addresses = [t.data_ptr() for t in vectors]
    step = addresses[1] - addresses[0]
    return (
        step % 4 == 0
        and all(t.stride(1) == 1 and t.stride(0) == first.stride(0) for t in vectors)
        and all(after - before == step for before, after in itertools.pairwise(addresses))
    )


def _places(lead: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, Tensor, int, int, int]:
    spacing = (others[1].data_ptr() - others[0].data_ptr()) // 4 if len(others) > 1 else 0
    return lead, others[0], lead.stride(0), spacing, others[0].stride(0)


def _shape(lead: Tensor, others: Sequence[Tensor]) -> dict[str, int]:
    n, dim = len(others) + 1, lead.shape[1]
    return {
        "n": n,
        "dim": dim,
        "rows": max(16, 1 << (n - 1).bit_length()),
        "columns": min(_MOST_COLUMNS, max(16, 1 << (dim - 1).bit_length())),
        "num_stages": 1,  # one block of columns is typical: stages would only take shared memory
    }
