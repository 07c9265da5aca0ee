"""Recording of CUDA graphs: launches that are queued once, to be replayed by one call each time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


def record(
    stream: torch.cuda.Stream | None, work: Callable[[], None], pool: Any = None
) -> torch.cuda.CUDAGraph:
    """A graph of what `work` queues, which is not run. Its kernels have run before: that loads them.

    stream: one that only recordings use. pool: of `torch.cuda.graph_pool_handle()`, for graphs that share
    memory. Unlike `torch.cuda.graph`, it does not wait for the device, and the memory that torch holds for
    later stays: work whose memory moves is recorded again.
    """
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the recording is invalid, which the error explains
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """While a graph is recorded, no garbage is collected: finalizers may wait for the device."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
