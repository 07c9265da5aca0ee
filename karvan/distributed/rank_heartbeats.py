"""Heartbeats of ranks that work for minutes between two collectives."""

from __future__ import annotations

import time

import torch

from karvan.distributed.collectives import CollectiveChannel


class RankHeartbeats:
    """Heartbeats of ranks that work for minutes, so that no rank waits longer than a channel allows.

    All ranks take part in each round; the work is done when all say so.
    """

    def __init__(self, channel: CollectiveChannel, timeout: float) -> None:
        self._channel = channel
        self._every = min(30.0, timeout / 4)
        self._last = time.monotonic()
        self._broken = False

    def still_working(self) -> None:
        """Called between parts of the work; does a round if it is time for one."""
        if time.monotonic() >= self._last + self._every:
            self._round(0)

    def finish(self) -> None:
        """Wait until all ranks have finished their work, successfully or not."""
        while not self._broken and self._round(1) < self._channel.world_size:
            pass

    def _round(self, done: int) -> int:
        self._broken = True
        total = int(self._channel.sum(torch.tensor([done])).item())
        self._broken = False
        self._last = time.monotonic()
        return total
