"""`DeviceDelivery`: finished batches go to a GPU, on the threads that made them.

The caller gets a batch whose copy may still be in flight: its stream waits for the copy, the caller does not.
Checks of a batch, such as those of labels, run before the copy, because on the GPU they would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from karvan.devices import Check, ColumnCopies, CopyInFlight
from karvan.ragged import Batch, Entry


class DeviceDelivery:
    """Checks batches and copies them to a GPU; several threads may send at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = ColumnCopies(device)
        self._checks: tuple[Check, ...] = ()

    @contextmanager
    def check(self, check: Check) -> Iterator[None]:
        """Within it, `check` is called with each batch before it is copied, and may raise."""
        before, self._checks = self._checks, (*self._checks, check)
        try:
            yield
        finally:
            self._checks = before

    def send(self, batch: Batch | Mapping[str, Entry]) -> CopyInFlight:
        """Check a batch and begin to copy it."""
        if isinstance(batch, tuple):
            raise TypeError(
                "With a device, a transform must give a mapping of names to columns, got a pair of features "
                "and labels: leave device out, and a Trainer copies it."
            )
        batch = batch if isinstance(batch, Batch) else Batch(batch)
        checks = self._checks
        for check in checks:
            check(batch)
        return self.copies.start(batch, checks)


def make_delivery(device: torch.device | None) -> DeviceDelivery | None:
    """How batches get to a GPU; None if they stay on the CPU."""
    return None if device is None else DeviceDelivery(device)
