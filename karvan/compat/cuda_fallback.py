"""`cuda_fallback`: programs that ask for a GPU run on the CPU where there is none, with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class _Fallback:
    """Whether it is active, and has warned."""

    active = False
    warned = False


@contextmanager
def cuda_fallback() -> Iterator[None]:
    """Within it, `torch.cuda.set_device`, `Module.cuda` and `Tensor.cuda` do nothing if there is no GPU.

    `device_of` then gives the CPU for a device "cuda" of an adapter's option. Where there is a GPU, nothing
    changes. At the end all is as before.
    """
    if torch.cuda.is_available():
        yield
        return
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "set_device", lambda device: _warn()),
        (torch.nn.Module, "cuda", lambda module, device=None: _unchanged(module)),
        (torch.Tensor, "cuda", lambda tensor, *args, **options: _unchanged(tensor)),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    _Fallback.active, _Fallback.warned = True, False
    for owner, name, replacement in places:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(places, before, strict=True):
            setattr(owner, name, original)
        _Fallback.active = False


def device_of(device: str | torch.device | None) -> torch.device:
    """The device of an option; of "cuda" the CPU, within `cuda_fallback` and without a GPU."""
    chosen = torch.device("cpu" if device is None else device)
    if chosen.type == "cuda" and _Fallback.active:
        _warn()
        return torch.device("cpu")
    return chosen


def _unchanged(value: T) -> T:
    _warn()
    return value


def _warn() -> None:
    if not _Fallback.warned:
        _Fallback.warned = True
        warnings.warn("The program asks for a GPU, but there is none: it runs on the CPU.", stacklevel=3)
