"""Recording of CUDA graphs: launches that are queued once, to be replayed by one call each time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def record(stream: torch.cuda.Stream | None, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `work` queues, which is not run. Its kernels have run before: that loads them.

    stream: that of recordings (`DeviceStreams.recording`). Waits for the device.
    """
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
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
