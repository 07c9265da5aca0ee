"""A device by its name: an error where this machine does not have it."""

from __future__ import annotations

from typing import Any

import torch

from karvan.distributed.gpu import missing_cuda


def check_device(device: torch.device | str) -> torch.device:
    """The device; raises if this machine does not have it."""
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device expects "cpu", "cuda" or "cuda:1", got {device!r}.') from error
    if made.type != "cuda":
        return made
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={str(device)!r} expects a GPU and a torch that is built with CUDA, but "
            f"{missing_cuda()}: omit device, or use device='cpu'."
        )
    if made.index is not None and made.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={str(device)!r} expects that GPU, but there are {count}, counted from 0.")
    return made


def exact_device(device: torch.device | str) -> torch.device:
    """The device with its index; raises if this machine does not have it.

    With its index, because other threads have their own current GPU, by default the first.
    """
    made = check_device(device)
    if made.type == "cuda" and made.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return made


def data_device(device: torch.device | str | None) -> torch.device | None:
    """The GPU that batches of data go to, with its index; None if they stay on the CPU."""
    if device is None:
        return None
    made = exact_device(device)
    if made.type not in ("cpu", "cuda"):
        raise ValueError(f'Batches go to "cpu", "cuda" or a certain GPU, such as "cuda:1", got {device!r}.')
    return made if made.type == "cuda" else None


def require_cpu_batches(data: Any) -> None:
    """Raise if the batches of this data arrive on a GPU: they are to be sent to other processes."""
    device = getattr(data, "device", None)
    if isinstance(device, torch.device) and device.type != "cpu":
        raise ValueError(
            f"A loader sends its batches to trainers, so it expects them on the CPU, got data with device="
            f"'{device}': read it without device. A trainer can move them: "
            "kv.data.Stream(kv.data.from_loaders(), device=…)."
        )
