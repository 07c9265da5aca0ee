"""`Run`: what every line gets."""

from __future__ import annotations

from functools import cached_property

from gpu_lines.device import Device
from gpu_lines.results import Results
from gpu_lines.sizes import Sizes


class Run:
    """The device, the sizes, where results go, and the bandwidths that bounds are made of.

    trace: the file for a trace of training, or None.
    """

    def __init__(self, device: Device, sizes: Sizes, results: Results, trace: str | None = None) -> None:
        self.device = device
        self.sizes = sizes
        self.results = results
        self.trace = trace

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a large copy on the device."""
        found = self.device.copy_bandwidth(self.sizes.copied)
        self.results.add("copy_TB_per_s", "copy on the device", found / 1e12, "TB/s")
        self.device.release()
        return found

    @cached_property
    def upload_bandwidth(self) -> float:
        """Bytes per second of a copy from page-locked memory to the device."""
        found = self.device.upload_bandwidth(self.sizes.copied // 2)
        self.results.add("upload_GB_per_s", "copy from page-locked memory", found / 1e9, "GB/s")
        self.device.release()
        return found
