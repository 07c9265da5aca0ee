"""Triton kernels for columns on a GPU: hashes of strings, arithmetic of ids, rows.

The modules here import triton. Others import them in functions, when a tensor on a GPU needs one.
"""

from __future__ import annotations

from torch import Tensor


def on_gpu(tensor: Tensor) -> bool:
    """Whether kernels compute with the tensor, rather than the native core."""
    return tensor.is_cuda


def may_copy(tensor: Tensor) -> bool:
    """Whether a kernel may copy the values: no gradient passes through it."""
    return on_gpu(tensor) and not tensor.requires_grad
