"""Memory of the machine that a GPU reads and writes directly: page-locked, at the addresses of the host."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from pathlib import Path

import torch

_KEPT = 16  # one part in so many of what is available stays for the rest of the machine
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


class HostMemoryError(torch.OutOfMemoryError):
    """There is no memory left on the machine."""


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """Memory of the machine for the kernels of a device; raises HostMemoryError if there is none.

    Linux gives out more memory than it has, and ends a process that uses it; so what is left is read first.
    """
    free = available_bytes()
    if free is not None and size > free - free // _KEPT:
        raise HostMemoryError(
            f"{size / 2**30:.2f} GiB more are needed, and {free / 2**30:.2f} GiB of the machine are available"
        )
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError as error:  # of the CUDA driver, which has a limit of its own
        raise HostMemoryError(f"{size / 2**30:.2f} GiB more cannot be page-locked: {error}") from error


def available_bytes() -> int | None:
    """How much memory this process can still get, by the machine and by its control group; None: unknown."""
    sizes = [
        int(line.split()[1]) << 10
        for line in (_MEMORY.read_text().splitlines() if _MEMORY.exists() else [])
        if line.startswith("MemAvailable:")
    ]
    try:
        most, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        sizes.append(max(0, most - used + cached))
    except (OSError, ValueError):  # no such group, or a limit of "max"
        pass
    return min(sizes, default=None)


# `DeviceBudget`: the GPU memory that rows may take, divided over the row layouts.


class DeviceBudget:
    """So many bytes for the rows of all layouts together.

    Layouts that have tables when the first of them needs memory get equal shares. One that comes later gets
    an equal share of what others have left: nothing, as a rule, so that its rows are in host memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._shares: dict[Hashable, int] = {}

    def share(self, layout: Hashable, in_use: Collection[Hashable]) -> int:
        """The bytes of a layout; in_use: those that have tables now. It stays the same from then on."""
        if layout not in self._shares:
            new = [layout for layout in {layout: None, **dict.fromkeys(in_use)} if layout not in self._shares]
            remaining = self.size - sum(size for layout, size in self._shares.items() if layout in in_use)
            self._shares |= dict.fromkeys(new, max(0, remaining) // len(new))
        return self._shares[layout]


# `TierStream`: the stream of exchanges, and how all other work on rows comes after them.


class TierStream:
    """Exchanges of rows are queued beside the current stream; `join` makes the current stream wait for them.

    On a CPU device, kernels run when they are queued. used: whether there is a host tier.
    """

    def __init__(self, device: torch.device, *, used: bool) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and used:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None  # of the last exchange, until it is known to be over

    def record(self) -> None:
        """An exchange was queued."""
        if self.stream is not None:
            self._done = self.stream.record_event()

    def join(self) -> None:
        """What is queued from now on, on the current stream, comes after the last exchange.

        A graph that is being recorded waits for nothing: whoever replays it joins.
        """
        done = self._done
        if done is None or torch.cuda.is_current_stream_capturing():
            return
        if done.query():  # type: ignore[no-untyped-call]
            self._done = None
            return
        current = torch.cuda.current_stream(self._device)
        if current != self.stream:
            current.wait_event(done)
