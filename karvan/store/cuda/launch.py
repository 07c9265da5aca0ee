"""What launches of kernels share: block shapes, working memory, the stream beside the current one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from karvan.store.cuda.kernels import fields

_BLOCK = fields.BLOCK.value
_ALIGN = 64  # elements: the start of every slice is aligned alike, so kernels are compiled once


def power(count: int) -> int:
    """The least power of two that is at least `count`, and 2."""
    return max(2, 1 << max(0, count - 1).bit_length())


def blocks(count: int) -> tuple[int]:
    """A grid for so many items, of which a program has a block."""
    return (max(1, -(-count // _BLOCK)),)


def coarse(count: int) -> int:
    """A number of blocks that is at least `count` and one of few: sizes that vary a little become equal."""
    if count <= 8:
        return count
    unit = 1 << (count.bit_length() - 4)
    return -(-count // unit) * unit


def tile(columns: int) -> tuple[int, int]:
    """Rows of a block with so many columns, and the warps that work on it."""
    rows = max(1, min(64, 1024 // columns))
    return rows, max(1, min(8, rows * columns // 512))


def copy_tile(columns: int) -> tuple[int, int]:
    """The same of copies of vectors: small blocks, so that those beside another kernel are not waited for."""
    rows = max(1, min(64, 512 // columns))
    return rows, max(1, min(8, rows * columns // 512))


class Workspace:
    """Several arrays in one allocation, which takes less of the host's time than one for each."""

    def __init__(self, dtype: torch.dtype, device: torch.device, **sizes: int) -> None:
        self._starts: dict[str, tuple[int, int]] = {}
        at = 0
        for name, size in sizes.items():
            self._starts[name] = (at, size)
            at += -(-size // _ALIGN) * _ALIGN
        self.memory = torch.empty(max(1, at), dtype=dtype, device=device)

    def __getitem__(self, name: str) -> Tensor:
        """An array; its content is undefined at first."""
        start, size = self._starts[name]
        return self.memory[start : start + size]


@contextmanager
def beside(stream: torch.cuda.Stream | None, shared: Sequence[Tensor]) -> Iterator[None]:
    """Queue work beside the current stream, after what is queued there now; it uses the memory `shared`.

    Without a stream, work is queued as usual.
    """
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    if not torch.cuda.is_current_stream_capturing():  # what a graph uses stays
        for tensor in shared:
            tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


def update_tile(columns: int, long: bool = False) -> dict[str, int]:
    """Of an update: rows of a block, gradients of a row that are read together, and warps.

    long: of long runs, which have many pieces each: fewer rows, and more pieces together. A block of many
    such rows would wait for the longest one, and Triton 3.6 does not compile it.
    """
    rows = max(1, min(64, 512 // columns))
    warps = max(1, min(8, rows * columns // 128))
    if long:
        return {"GROUP": max(1, rows // 8), "TOGETHER": max(1, min(16, 4096 // columns)), "num_warps": warps}
    return {"GROUP": rows, "TOGETHER": 2 if columns <= 512 else 1, "num_warps": warps}


def join(stream: torch.cuda.Stream | None) -> None:
    """Let the current stream wait for what is queued beside it."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


# Triton's interpreter, in which the kernels of a store on "cpu" run: threads launch one kernel at a time.


_patching = threading.Lock()
_launching = threading.RLock()
_takes_turns = False


def take_turns() -> None:
    """Have threads wait for each other: the interpreter has one state, the current program, for all of them.

    A GPU needs no such thing. There is nothing to set in the interpreter, so its launch is replaced.
    """
    from triton.runtime import interpreter  # not needed on a GPU

    global _takes_turns
    with _patching:
        if _takes_turns:
            return
        _takes_turns = True
        run = interpreter.GridExecutor.__call__

        def run_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _launching:
                return run(self, *args, **kwargs)

        interpreter.GridExecutor.__call__ = run_alone
