"""`cuda_fallback`: programs that ask for a GPU run on the CPU where there is none, with one warning."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from karvan.torch_internals import DeviceContext

Function: TypeAlias = Callable[..., Any]
Replacement: TypeAlias = Callable[[Function], Function]
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class _Fallback:
    """Whether it is active, and has warned."""

    active = False
    warned = False


@contextmanager
def cuda_fallback() -> Iterator[None]:
    """Within it, what asks for a GPU stays on the CPU, if there is no GPU.

    That is `Tensor.cuda` and `Module.cuda`, `to("cuda")`, `device="cuda"` of functions, `with torch.device`,
    `torch.set_default_device`, page-locked memory, `torch.load` of what was saved on a GPU, process groups of
    nccl, and devices of DistributedDataParallel; streams and events of `torch.cuda` have nothing to wait for.
    Numbers of threads below 1, as `cpu_count() // 16` gives on small machines, become 1. It covers this
    thread and those that are started within it. `device_of` gives the CPU for an adapter's option. Where
    there is a GPU, nothing changes. At the end all is as before.
    """
    if torch.cuda.is_available():
        yield
        return
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _PLACES]
    _Fallback.active, _Fallback.warned = True, False
    for (owner, name, replaced), (_, _, original) in zip(_PLACES, before, strict=True):
        setattr(owner, name, replaced(original))
    try:
        with _CpuDevices():
            yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
        _Fallback.active = False


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
        moved = _on_cpu(kwargs or {})
        if moved.pop("pin_memory", False):
            _warn()
        return func(*args, **moved)


class _Stream:
    """A stream or an event without a GPU: what it waits for is done already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        _warn()
        self._time = 0.0

    def record(self, *args: Any) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: _Stream) -> float:
        return 1000 * (end._time - self._time)

    def query(self) -> bool:
        return True

    def synchronize(self, *args: Any) -> None:
        pass

    wait = wait_event = wait_stream = synchronize


def _changing(change: Callable[[tuple[Any, ...], dict[str, Any]], Arguments]) -> Replacement:
    """A function with other arguments."""

    def replaced(original: Function) -> Function:
        def changed(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = change(args, kwargs)
            return original(*args, **kwargs)

        return changed

    return replaced


def _giving(value: Any) -> Replacement:
    """A function that gives a value, whatever it is called with."""

    def give(*args: Any, **options: Any) -> Any:
        _warn()
        return value

    return lambda original: give


def _giving_back(original: Function) -> Function:
    """A method that gives back what it is called on."""

    def give_back(value: Any, *args: Any, **options: Any) -> Any:
        _warn()
        return value

    return give_back


def _devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The CPU for a GPU as the second argument, or as that of this name."""
    return (*args[:1], *map(_cpu_for, args[1:2]), *args[2:]), _on_cpu(kwargs)


def _without_gpus(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The module alone, without its devices."""
    return args[:2], {name: kwargs[name] for name in kwargs if name not in ("device_ids", "output_device")}


def _to_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Tensors are loaded to the CPU unless a function, or another device than a GPU, says where to."""
    arguments = {**dict(zip(("f", "map_location"), args[:2], strict=False)), **kwargs}
    place = arguments.get("map_location")
    arguments["map_location"] = "cpu" if place is None or isinstance(place, Mapping) else _cpu_for(place)
    return (arguments.pop("f"), arguments.pop("map_location"), *args[2:]), arguments


def _without_nccl(original: Function) -> Function:
    """A process group of gloo."""
    names = list(signature(original).parameters)

    def start(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if arguments.pop("device_id", None) is not None or "nccl" in str(arguments.get("backend")):
            _warn()
            arguments["backend"] = "gloo"
        return original(**arguments)

    return start


def _at_least_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return tuple(max(1, count) for count in args), kwargs


def _in_the_thread(start: Function) -> Function:
    """Also the functions that the thread calls have their devices on the CPU."""

    def start_within(thread: Any) -> None:
        run = thread.run

        def run_within() -> None:
            with _CpuDevices() if _Fallback.active else nullcontext():
                run()

        thread.run = run_within
        start(thread)

    return start_within


_STREAMS = ("Stream", "Event", "current_stream", "default_stream")
_PLACES: list[tuple[Any, str, Replacement]] = [
    *((torch.cuda, name, _giving(None)) for name in ("set_device", "synchronize", "reset_peak_memory_stats")),
    *((torch.cuda.nvtx, name, _giving(None)) for name in ("mark", "range_push", "range_pop")),
    *((torch.cuda, name, _giving(nullcontext())) for name in ("device", "stream")),
    *((torch.cuda, name, lambda _: _Stream) for name in _STREAMS),
    (torch.cuda, "current_device", _giving(0)),
    *((owner, "cuda", _giving_back) for owner in (torch.nn.Module, torch.Tensor, torch.UntypedStorage)),
    (torch.Tensor, "pin_memory", _giving_back),
    (torch.Tensor, "record_stream", _giving(None)),
    (torch.Tensor, "to", _changing(_devices)),
    (torch.nn.Module, "to", _changing(_devices)),
    (DeviceContext, "__init__", _changing(_devices)),
    (DistributedDataParallel, "__init__", _changing(_without_gpus)),
    (torch, "load", _changing(_to_cpu)),
    (dist, "init_process_group", _without_nccl),
    (dist, "new_group", _without_nccl),
    (torch, "set_num_threads", _changing(_at_least_one)),
    (torch, "set_num_interop_threads", _changing(_at_least_one)),
    (threading.Thread, "start", _in_the_thread),
]
"""What is replaced: of its owner the attribute, by what the function makes of it."""


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _cpu_for(value) if name == "device" else value for name, value in kwargs.items()}


def _cpu_for(value: Any) -> Any:
    """The CPU for a GPU, also for the number of one; anything else as it is."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if number or (str(value).partition(":")[0] == "cuda" and isinstance(value, str | torch.device)):
        _warn()
        return torch.device("cpu")
    return value


def _warn() -> None:
    if not _Fallback.warned:
        _Fallback.warned = True
        warnings.warn("The program asks for a GPU, but there is none: it runs on the CPU.", stacklevel=3)
