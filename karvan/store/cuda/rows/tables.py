"""`DeviceTable`: one table of a `CudaStore`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from karvan.store.cuda.kernels import fields
from karvan.store.cuda.rows.arena import Bound, RowArena
from karvan.store.cuda.rows.index import KeyIndex
from karvan.store.types import TableSpec

_INIT_LEVELS = {"normal": 1, "truncated_normal": 1, "gamma": 2, "poisson": 2}


class DeviceTable:
    """A table: its settings, its index, and the arena of its rows."""

    def __init__(self, spec: TableSpec, number: int, device: torch.device, arena: RowArena) -> None:
        self.spec = spec
        self.number = number  # among the store's tables
        self.arena = arena
        self.index = KeyIndex(device)
        self.initial_state: tuple[float, ...] = ()
        self.version = 0
        self.used = Bound()
        self.rows = Bound()
        self.room = 0  # positions that lookups may still have before the host must look at the bounds
        self.erasures = ErasureLog()
        self.filter: torch.Tensor | None = None  # counters of keys without a row, for MinCount
        self.checked_rule = ("", arena)  # the kind of rule that its rows are known to have the state for
        self.captured = False  # whether a capture of it is open
        self.skipped = 0  # updates that were skipped by the host
        self.clock: list[tuple[int, float]] = []  # for TTL: (step, time) now and then
        self._time = self._shown = 0.0

    @property
    def admits_all(self) -> bool:
        """Whether every key gets a row."""
        return self.spec.admit[0] == "always"

    @property
    def init_level(self) -> int:
        """How much the kernel that fills rows must know: 1 with normals, 2 also with gamma and Poisson."""
        return _INIT_LEVELS.get(self.spec.init[0], 0)

    def learn(self, counters: NDArray[np.int64], time: int) -> None:
        """What the host has read of the table's counters."""
        counters_of_table = counters[self.number * fields.COUNTERS.value :]
        self.used.learn(int(counters_of_table[fields.USED.value]), time)
        self.rows.learn(int(counters_of_table[fields.ROWS.value]), time)

    def next_version(self) -> int:
        """The version after a change; see `next_versions`."""
        next_versions([self])
        return self.version

    def move_to(self, arena: RowArena) -> None:
        """Have rows in another arena from now on."""
        self.arena = arena
        arena.newest_version = max(arena.newest_version, self.version)

    def advance_time(self, now: float) -> float:
        """The table's time, which does not fall when the clock was set back."""
        latest = max(self._time, self.clock[-1][1]) if self.clock else self._time
        self._time = now if now >= latest else latest + max(0.0, now - self._shown)
        self._shown = now
        return self._time


def next_versions(tables: Iterable[DeviceTable]) -> None:
    """Give tables their version after a change, which those of one arena share.

    Versions grow over all tables of an arena, as their rows' births do: a row that one table has released and
    another has got since is then known to be another one.
    """
    done: dict[RowArena, int] = {}
    for table in tables:
        arena = table.arena
        if arena not in done:
            arena.newest_version += 1
            done[arena] = arena.newest_version
        table.version = done[arena]


class ErasureLog:
    """Hashes of removed keys, by version. Beyond `most`, the oldest are forgotten."""

    def __init__(self) -> None:
        self._log: deque[tuple[int, torch.Tensor]] = deque()
        self._total = 0
        self.newest = 0
        self.forgotten = 0

    def add(self, version: int, hashes: torch.Tensor, most: int) -> None:
        """Keys were removed."""
        if not hashes.numel():
            return
        self.newest = version
        self._log.append((version, hashes))
        self._total += hashes.numel()
        while self._total > most and len(self._log) > 1:
            self.forgotten, keys = self._log.popleft()
            self._total -= keys.numel()

    def knows(self, version: int) -> bool:
        """Whether all keys that were removed after a version are known."""
        return version >= self.forgotten

    def since(self, version: int) -> torch.Tensor | None:
        """The hashes of keys that were removed after a version; None if there are none."""
        erased = [hashes for at, hashes in self._log if at > version]
        return torch.cat(erased) if erased else None

    @property
    def bytes(self) -> int:
        """Memory of the log."""
        return 8 * self._total
