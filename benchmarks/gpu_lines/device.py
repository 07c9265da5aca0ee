"""The device that is measured: engines on it, graphs, clocks, and steps that take turns.

On "cpu" the kernels run in Triton's interpreter and graphs are plain loops. That is how the tests run every
line; the times mean nothing then.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import karvan as kv

_CYCLES = 2e9  # of a GPU in a second, roughly
WARM = 6  # untimed steps of a turn, more than there are graphs and batches that take turns


class Device:
    """A GPU, or the CPU with Triton's interpreter."""

    def __init__(self, kind: str = "cuda") -> None:
        self.device = torch.device(kind)
        self.is_gpu = self.device.type == "cuda"

    @property
    def name(self) -> str:
        """What the device calls itself."""
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "Triton's interpreter"

    def wait(self) -> None:
        """Until all work is done."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give back the memory of what is not used any more."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def connect(self, device_memory: int | None = None) -> None:
        """Choose where the rows of models are; device_memory: bytes that they may take on the GPU."""
        if not self.is_gpu:  # models make their own engines, and there is no public way to the interpreter
            kv.connect("memory")
        elif device_memory is None:
            kv.connect("cuda")
        else:
            kv.connect("cuda", device_memory=device_memory)

    def engine(
        self, tables: Mapping[str, kv.Table], device_memory: int | None = None, seed: int = 0
    ) -> kv.EmbeddingEngine:
        """An engine whose rows are on the device."""
        if self.is_gpu:
            self.connect(device_memory)
            return kv.EmbeddingEngine(tables, seed=seed)
        from karvan.store.cuda.store import CudaStore

        limit = {} if device_memory is None else {"device_memory": device_memory}
        return kv.EmbeddingEngine(tables, seed=seed, store=CudaStore("cpu", **limit))

    def seconds(self, work: Callable[[], None]) -> float:
        """The time that the device takes for some work."""
        if not self.is_gpu:
            begin_time = time.perf_counter()
            work()
            return time.perf_counter() - begin_time
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Does the same work without the time of its launches."""
        work()  # kernels are compiled
        self.wait()
        if not self.is_gpu:
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        self.wait()
        return graph.replay

    def sleep(self, seconds: float) -> None:
        """Keep the device busy, so that what is queued meanwhile begins without gaps."""
        if self.is_gpu:
            torch.cuda._sleep(int(seconds * _CYCLES))

    def random(self, seed: int) -> torch.Generator:
        """A source of random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(*shape, device=self.device)

    def copy_bandwidth(self, floats: int) -> float:
        """Bytes read and written per second by a large copy on the device."""
        source = self.normal(floats)
        target = torch.empty_like(source)
        return 2 * source.nbytes / min(self.seconds(lambda: target.copy_(source)) for _ in range(10))

    def upload_bandwidth(self, floats: int) -> float:
        """Bytes per second that a copy from page-locked memory of the machine brings to the device."""
        source = torch.ones(floats, pin_memory=self.is_gpu)
        target = torch.empty(floats, device=self.device)

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return source.nbytes / min(self.seconds(copy) for _ in range(5))


def power_law(
    source: torch.Generator, count: int, keys: int, exponent: float = 1.05, spread: int = 7919
) -> Tensor:
    """Keys from 1 to `keys`, the k-th with a probability of about k ** -exponent, times `spread`."""
    drawn = torch.rand(count, generator=source, device=source.device, dtype=torch.float64)
    ranks = ((keys ** (1 - exponent) - 1) * drawn + 1) ** (1 / (1 - exponent))
    return ranks.long().clamp(1, keys) * spread


def take_turns(
    device: Device, candidates: Mapping[str, Callable[[int], None]], rounds: int, steps: Mapping[str, int]
) -> dict[str, float]:
    """Seconds of a step of each candidate, by the wall clock: the median of rounds, in which all take turns.

    A step gets its number. A turn has some untimed steps first.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    number = dict.fromkeys(candidates, 0)

    def run(name: str, count: int) -> None:
        for _ in range(count):
            candidates[name](number[name])
            number[name] += 1

    for _ in range(rounds):
        for name in candidates:
            run(name, min(WARM, steps[name]))
            device.wait()
            begin = time.perf_counter()
            run(name, steps[name])
            device.wait()
            times[name].append((time.perf_counter() - begin) / steps[name])
    return {name: statistics.median(values) for name, values in times.items()}
