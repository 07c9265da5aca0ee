"""What a trace says of a stretch of steps: how busy the GPU was, and which calls made the host wait.

Traces are those of torch.profiler, in Chrome's format. Only work of the GPU and calls of CUDA are recorded,
which hardly delays the program. Calls before the first and after the last launch of a kernel do not count:
there the profiler itself waits for the GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpu_lines.device import Device
from gpu_lines.results import Wanted
from gpu_lines.run import Run

Event = Mapping[str, Any]

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_LAUNCHES = ("LaunchKernel", "GraphLaunch")
# Waiting for all work that is queued. The driver's calls have the same names with "cu" and perhaps a version.
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "CtxSynchronize", "Memcpy", "MemcpyHtoD", "MemcpyDtoH")
_EVENT_WAITS = ("EventSynchronize",)  # for one batch of the past: that is how a host far ahead is held back


@dataclass(frozen=True)
class Summary:
    """A stretch of steps, from the first to the last work of the GPU."""

    seconds: float
    busy_seconds: float  # of the GPU
    launches: int
    waits: Mapping[str, int]  # calls that wait for all queued work, by name
    event_waits: int
    event_wait_seconds: float

    @property
    def busy_share(self) -> float:
        """The share of the time in which the GPU worked."""
        return self.busy_seconds / self.seconds


class Recorder:
    """Records from `start` to `stop`, once in a process and last in it.

    A second recording may be empty, and CUDA's profiling interface slows down what comes after the first.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        os.environ.setdefault("TEARDOWN_CUPTI", "0")  # some versions crash if graphs outlive it
        self._profile = profile(activities=[ProfilerActivity.CUDA if device.is_gpu else ProfilerActivity.CPU])

    def start(self) -> None:
        """Begin, with an idle device."""
        self._device.wait()
        self._profile.start()

    def stop(self) -> None:
        """End, when the device has done what is queued."""
        self._device.wait()
        self._profile.stop()

    def events(self, path: str | None) -> list[Event]:
        """What was recorded, once; written to a file, too, which Perfetto and chrome://tracing show."""
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(made))
            events = list(json.loads(made.read_text())["traceEvents"])
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(made, path)
        return events


def summarise(events: Iterable[Event]) -> Summary | None:
    """What a trace says; None if it has no work of a GPU."""
    complete = [event for event in events if event.get("ph") == "X"]
    work = [event for event in complete if event.get("cat") in _WORK]
    calls = [event for event in complete if event.get("cat") in _CALLS]
    launches = [call for call in calls if any(name in call["name"] for name in _LAUNCHES)]
    if not work or not launches:
        return None
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in work]
    first, last = (choose(float(call["ts"]) for call in launches) for choose in (min, max))
    inside = [call for call in calls if first <= float(call["ts"]) <= last]
    event_waits = [call for call in inside if _is_one_of(call["name"], _EVENT_WAITS)]
    return Summary(
        seconds=(max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e6,
        busy_seconds=covered(spans) / 1e6,
        launches=len(launches),
        waits=Counter(call["name"] for call in inside if _is_one_of(call["name"], _WAITS)),
        event_waits=len(event_waits),
        event_wait_seconds=sum(float(call["dur"]) for call in event_waits) / 1e6,
    )


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def report(run: Run, key: str, what: str, steps: int, events: Iterable[Event]) -> None:
    """Add what a trace of so many steps says; figures have names that begin with `key`."""
    found = summarise(events)
    if found is None:
        run.results.skip(f"{key}_trace", "the profiler has recorded no work of a GPU")
        return
    waits = sum(found.waits.values())
    run.results.add(f"{key}_gpu_busy_share", f"trace of {what}: GPU busy", found.busy_share, "of the time")
    run.results.add(f"{key}_gpu_ms", "  GPU's work, of a step", found.busy_seconds / steps * 1e3, "ms")
    run.results.add(
        f"{key}_waits_per_step",
        "  calls that wait for the GPU, of a step",
        waits / steps,
        wanted=Wanted(0, True),
    )
    run.results.note(
        **{
            f"{key}_launches_per_step": found.launches / steps,
            f"{key}_event_waits_per_step": found.event_waits / steps,
            f"{key}_event_wait_ms_per_step": found.event_wait_seconds / steps * 1e3,
            f"{key}_traced_ms": found.seconds / steps * 1e3,
            f"{key}_waits": ", ".join(f"{name} {count}" for name, count in found.waits.items()) or "none",
        }
    )


def _is_one_of(call: str, names: Sequence[str]) -> bool:
    """Whether a call of CUDA's runtime or driver has one of these names."""
    bare = call.split("_v")[0].removeprefix("cuda").removeprefix("cu")
    return bare in names
