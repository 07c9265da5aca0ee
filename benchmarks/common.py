"""What every benchmark shares: arguments, interleaved timing, Zipf keys, memory, tables and JSON."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


def parser(description: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options all benchmarks have."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--quick", action="store_true", help="smaller tables and fewer rounds")
    result.add_argument("--json", metavar="PATH", help="write the result as JSON to PATH; - is stdout")
    return result


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_counts() -> list[int]:
    """Return the thread counts every candidate is measured with: one, and all cores."""
    return sorted({1, cores()})


@dataclass
class Report:
    """The result of one benchmark: ratios are what is gated, figures are what explains them."""

    name: str
    quick: bool
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float | int | str | bool] = field(default_factory=dict)
    _timings: list[tuple[str, float, float]] = field(default_factory=list)
    _start: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), _others_cpu_seconds()))

    def __post_init__(self) -> None:
        self.figures |= {"machine": platform.machine(), "cores": cores(), "quick": self.quick}

    def add_timing(self, name: str, seconds: float, samples: int) -> None:
        """Add the time of one step over `samples` samples, shown in a table of its own."""
        self._timings.append((name, seconds * 1e3, samples / seconds))

    def finish(self) -> None:
        """Note how much of the machine other processes took: above a few percent, measure again."""
        wall, others = time.perf_counter() - self._start[0], _others_cpu_seconds() - self._start[1]
        self.figures["share_of_machine_used_by_others"] = max(0.0, others / (wall * (os.cpu_count() or 1)))

    def write(self, path: str | None) -> None:
        """Write the report as JSON; a path of None writes nothing."""
        if path is None:
            return
        figures = dict(self.figures)
        for name, milliseconds, rate in self._timings:
            figures |= {f"{name}_ms": milliseconds, f"{name}_samples_per_s": rate}
        body = {"name": self.name, "ratios": _rounded(self.ratios), "figures": _rounded(figures)}
        text = json.dumps(body, indent=2) + "\n"
        if path == "-":
            sys.stdout.write(text)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)

    def show(self) -> None:
        """Print figures, timings and ratios, each as a table; what is empty is left out."""
        pairs = {"figure": self.figures, "ratio": self.ratios}
        tables = {
            name: ([name, ""], [[k, _text(v)] for k, v in each.items()]) for name, each in pairs.items()
        }
        tables["step"] = (["step", "ms", "samples/s"], [[n, _text(m), _text(r)] for n, m, r in self._timings])
        for name in ("figure", "step", "ratio"):
            header, rows = tables[name]
            if rows:
                print(f"\n{table(header, rows)}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text: the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join(
            [first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        )

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def interleave(
    candidates: Mapping[str, Callable[[], None]], rounds: int, burst: int = 3
) -> dict[str, list[float]]:
    """Run the candidates in turn, `rounds` times, and return the seconds of each one's timed steps.

    A turn is `burst` steps of one candidate. The first is not timed: the candidate before it left the
    caches full of its own rows, OpenMP threads spinning, and another thread count.
    """
    if burst < 2:
        raise ValueError(f"A burst has one untimed step and at least one timed, but burst is {burst}.")
    times: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, step in candidates.items():
                step()
                for _ in range(burst - 1):
                    start = time.perf_counter()
                    step()
                    times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each candidate's times."""
    return {name: statistics.median(values) for name, values in times.items()}


class Zipf:
    """Ids 0..size-1 with a bounded Zipf distribution, popular ids spread at random over the range.

    The first ranks have their exact probability; in the tail, where neighbours hardly differ, the sum is
    replaced by its integral.
    """

    def __init__(self, size: int, exponent: float = 1.05, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._ids = self._rng.permutation(size)
        self._power = 1.0 - exponent
        self._edge = min(size, 4096) + 0.5
        self._head = np.cumsum(np.arange(1, min(size, 4096) + 1, dtype=np.float64) ** -exponent)
        tail = ((size + 0.5) ** self._power - self._edge**self._power) / self._power
        self._total = self._head[-1] + tail

    def sample(self, count: int) -> np.ndarray:
        """Return `count` ids as int64."""
        mass = self._rng.random(count) * self._total
        ranks = np.searchsorted(self._head, mass, side="right")
        tail = np.flatnonzero(ranks == len(self._head))
        beyond = (mass[tail] - self._head[-1]) * self._power + self._edge**self._power
        ranks[tail] = (beyond ** (1.0 / self._power) + 0.5).astype(np.int64) - 1
        return self._ids[np.minimum(ranks, len(self._ids) - 1)]


def scramble(ids: np.ndarray, table: int = 0) -> np.ndarray:
    """Return distinct 64-bit keys for the ids of one table (splitmix64, which is a bijection)."""
    bits = ids.astype(np.uint64) + np.uint64(table << 40)
    bits += np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))).view(np.int64)


def resident() -> int:
    """Return the bytes of memory this process holds (RSS)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def release() -> None:
    """Collect garbage and hand free memory back to the system, so that the next workload starts clean."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _others_cpu_seconds() -> float:
    """Return the CPU time the system spent on anything but this process and its children."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def _rounded(values: Mapping[str, object]) -> dict[str, object]:
    return {key: float(f"{v:.5g}") if isinstance(v, float) else v for key, v in values.items()}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
