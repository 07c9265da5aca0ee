"""Short measurements of this machine, for `karvan bench` and `karvan doctor`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from statistics import median

_BLOCK = 8 << 20


def disk_rate(folder: Path, size: int = 64 << 20) -> float:
    """Bytes per second that reach the disk: written to a temporary file in the folder, and flushed."""
    block = os.urandom(_BLOCK)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".karvan-disk-") as file:
        begin = time.perf_counter()
        for _ in range(max(1, size // _BLOCK)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return max(1, size // _BLOCK) * _BLOCK / (time.perf_counter() - begin)


def steps_per_second(step: Callable[[int], None], *, seconds: float, least: int = 5) -> float:
    """How often a step runs in a second, by the median of its times; the first two are not counted."""
    times: list[float] = []
    end = 0.0
    for number in cycle(range(1024)):
        begin = time.perf_counter()
        step(number)
        now = time.perf_counter()
        times.append(now - begin)
        if len(times) == 2:
            end = now + seconds
        if len(times) >= least + 2 and now > end:
            return 1 / median(times[2:])
    raise AssertionError("unreachable: the loop does not end")


def seconds_to(run: Callable[[], object]) -> float:
    """How many seconds a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def exhaust(data: Iterable[object]) -> None:
    """Iterate over all of the data."""
    for _ in data:
        pass
