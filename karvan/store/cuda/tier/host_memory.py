"""Memory of the machine that a GPU reads and writes directly: page-locked, at the addresses of the host."""

from __future__ import annotations

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
    left = available_bytes()
    if left is not None and size > left - left // _KEPT:
        raise HostMemoryError(
            f"{size / 2**30:.2f} GiB more are needed, and {left / 2**30:.2f} GiB of the machine are available"
        )
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError as error:  # of the CUDA driver, which has a limit of its own
        raise HostMemoryError(f"{size / 2**30:.2f} GiB more cannot be page-locked: {error}") from error


def available_bytes() -> int | None:
    """How much memory this process can still get, by the machine and by its control group; None: unknown."""
    found = [
        int(line.split()[1]) << 10
        for line in (_MEMORY.read_text().splitlines() if _MEMORY.exists() else [])
        if line.startswith("MemAvailable:")
    ]
    try:
        most, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        found.append(max(0, most - used + cached))
    except (OSError, ValueError):  # no such group, or a limit of "max"
        pass
    return min(found, default=None)
