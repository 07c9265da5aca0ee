"""`cuda_fallback`: programs that ask for a GPU run on the CPU where there is none, with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from karvan.torch_internals import DeviceContext

T = TypeVar("T")
Change: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]

_init_process_group = dist.init_process_group


class _Fallback:
    """Whether it is active, and has warned."""

    active = False
    warned = False


@contextmanager
def cuda_fallback() -> Iterator[None]:
    """Within it, what asks for a GPU stays on the CPU, if there is no GPU.

    That is `Tensor.cuda` and `Module.cuda`, `to("cuda")`, `device="cuda"` of functions, `with torch.device`,
    `torch.set_default_device`, `torch.cuda.set_device`, `torch.load(map_location="cuda")` and process groups
    of nccl. Numbers of threads below 1, as `cpu_count() // 16` gives on small machines, become 1. Functions
    with a device are covered in this thread, and in others within `cpu_devices`. `device_of` gives the CPU
    for an adapter's option. Where there is a GPU, nothing changes. At the end all is as before.
    """
    if torch.cuda.is_available():
        yield
        return
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _PLACES]
    _Fallback.active, _Fallback.warned = True, False
    for (owner, name, change), (_, _, original) in zip(_PLACES, before, strict=True):
        setattr(owner, name, _with_arguments(original, change) if change else _unchanged)
    try:
        with cpu_devices():
            yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
        _Fallback.active = False


@contextmanager
def cpu_devices() -> Iterator[None]:
    """Within it, `device="cuda"` of torch's functions is the CPU, if `cuda_fallback` is active."""
    if not _Fallback.active:
        yield
        return
    with _CpuDevices():
        yield


def device_of(device: str | torch.device | None) -> torch.device:
    """The device of an option; of "cuda" the CPU, within `cuda_fallback` and without a GPU."""
    chosen = torch.device("cpu" if device is None else device)
    if chosen.type == "cuda" and _Fallback.active:
        _warn()
        return torch.device("cpu")
    return chosen


class _CpuDevices(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **_on_cpu(kwargs or {}, "device"))


def _with_arguments(original: Callable[..., Any], change: Change) -> Callable[..., Any]:
    """A function with other arguments."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(args, kwargs)
        return original(*args, **kwargs)

    return changed


def _devices(*names: str) -> Change:
    """The second argument, and those of these names, if they are devices."""
    return lambda args, kwargs: ((*args[:1], *map(_cpu_for, args[1:2]), *args[2:]), _on_cpu(kwargs, *names))


def _without_nccl(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A process group of gloo."""
    given = {**dict(zip(signature(_init_process_group).parameters, args, strict=False)), **kwargs}
    if given.pop("device_id", None) is not None or "nccl" in str(given.get("backend")):
        _warn()
        given["backend"] = "gloo"
    return (), given


def _at_least_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(max(1, count) for count in args), kwargs


_PLACES: list[tuple[Any, str, Change | None]] = [
    (torch.cuda, "set_device", None),
    (torch.nn.Module, "cuda", None),
    (torch.Tensor, "cuda", None),
    (torch.Tensor, "to", _devices("device")),
    (torch, "load", _devices("map_location")),
    (DeviceContext, "__init__", _devices("device")),
    (dist, "init_process_group", _without_nccl),
    (torch, "set_num_threads", _at_least_one),
    (torch, "set_num_interop_threads", _at_least_one),
]
"""What is replaced: by a function that changes arguments, or by one that gives its first argument back."""


def _on_cpu(kwargs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: _cpu_for(value) if name in names else value for name, value in kwargs.items()}


def _cpu_for(value: Any) -> Any:
    """The CPU for a GPU, also for the number of one; anything else as it is."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if number or (str(value).partition(":")[0] == "cuda" and isinstance(value, str | torch.device)):
        _warn()
        return torch.device("cpu")
    return value


def _unchanged(value: T, *args: Any, **options: Any) -> T:
    _warn()
    return value


def _warn() -> None:
    if not _Fallback.warned:
        _Fallback.warned = True
        warnings.warn("The program asks for a GPU, but there is none: it runs on the CPU.", stacklevel=3)
