"""Triton as the kernels use it: decorators, names for the types of arguments, and the launch.

Only modules of kernels import this one, and those are imported when the first tensor on a GPU needs them:
Karvan itself imports without triton. With TRITON_INTERPRET=1 in the environment before the import, kernels
run in triton's interpreter on CPU tensors, as the tests run them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "Columns on a GPU are computed by kernels that need triton 3.6 or newer, but it cannot be imported: "
        'install it (pip install "triton>=3.6"; torch for CUDA comes with it), or move the columns to the '
        'CPU with batch.to("cpu").'
    ) from error

__all__ = [
    "Bytes",
    "Elements",
    "Floats",
    "Ids",
    "Integer",
    "Kernel",
    "Lanes",
    "Stride",
    "checking_kernel",
    "device_function",
    "kernel",
    "launch",
    "tl",
]

# Types of arguments. Triton accepts types of its own alone in the signature of a kernel, and mypy knows none.
if TYPE_CHECKING:
    Bytes: TypeAlias = Any
    Ids: TypeAlias = Any
    Elements: TypeAlias = Any
    Integer: TypeAlias = Any
    Lanes: TypeAlias = Any
    Floats: TypeAlias = Any
    Stride: TypeAlias = Any
else:
    Bytes = tl.pointer_type(tl.uint8)
    Ids = tl.pointer_type(tl.int64)
    Elements = tl.pointer_type(tl.int64)  # or to smaller integers: rows are copied whatever they mean
    Integer = tl.int64  # or int32; a kernel is not compiled again for a number that is 1 or divides by 16
    Lanes = tl.uint64  # or another: one value for each element of a block
    Floats = tl.pointer_type(tl.float32)
    Stride = tl.int64  # or int32; a kernel is compiled again for one that divides by 16: accesses are wider

Function = TypeVar("Function", bound=Callable[..., Any])


class Kernel(Protocol):
    """A function that runs in many programs on a device."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The launch of so many programs."""


def kernel(function: Callable[..., None]) -> Kernel:
    """Have Triton compile a kernel."""
    return cast(Kernel, triton.jit(function, do_not_specialize=_numbers(function)))


def checking_kernel(function: Callable[..., None]) -> Kernel:
    """Have Triton compile a kernel with its assertions, which it omits from others."""
    return cast(Kernel, triton.jit(function, do_not_specialize=_numbers(function), debug=True))


def _numbers(function: Callable[..., None]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name, parameter in parameters.items() if parameter.annotation == "Integer"]


def device_function(function: Function) -> Function:
    """Have Triton compile a function that kernels call."""
    return cast(Function, triton.jit(function))


def launch(
    program: Kernel, count: int, block: int, out: Tensor, *arguments: object, **constants: int
) -> None:
    """Run a kernel on the device of `out` for `count` elements, `block` of them a program.

    The kernel gets `out` and `count` after the other arguments.
    """
    if not count:
        return
    grid = (-(-count // block),)
    if out.is_cuda and out.get_device() != torch.cuda.current_device():
        with torch.cuda.device(out.device):
            program[grid](*arguments, out, count, block=block, **constants)
    else:
        program[grid](*arguments, out, count, block=block, **constants)
