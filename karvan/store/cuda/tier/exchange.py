"""Hot rows come to the device: the exchange that follows the lookup of each training batch.

It is queued on a stream of its own, beside the dense forward and backward, and uses what the lookup has
found: the batch's distinct rows. Of the batch that was prepared to be next, it finds the rows, without those
of unknown keys, and brings them as well, so that the next lookup meets them on the device. Whatever touches
rows or indexes after that, on any stream, waits for the exchange first (`TierStream.join`). Captures that
read rows in the background pause for it (`RowArena.pause`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import torch
from typing_extensions import override

from karvan.store.cuda import launch
from karvan.store.cuda.batch.batch_ids import FeatureIds
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.batch.layouts import BatchLayout
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.tier.arena import TieredArena
from karvan.store.cuda.tier.arena_exchange import ArenaExchange, ExchangeSizes, NextIds


class BatchIds(Protocol):
    """A batch whose ids are on the device."""

    layout: BatchLayout
    ids: Sequence[FeatureIds]

    def receive(self, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream wait for the ids, and their memory for the stream."""


class NoExchange:
    """For stores without a host tier."""

    def expect(self, batch: BatchIds) -> None:
        """A batch was prepared for a training lookup."""

    def follow(self, batch: BatchIds, lookups: Sequence[LookupBuffers], step: int) -> None:
        """A batch was looked up for training."""


class RowExchange(NoExchange):
    """Exchanges the locations of rows, for the tables of one device."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._expected: list[weakref.ref[BatchIds]] = []
        self._lock = Lock()
        self._launches: dict[TieredArena, ArenaExchange] = {}
        self._held: Sequence[LookupBuffers] = ()  # that the last exchange may still read

    @override
    def expect(self, batch: BatchIds) -> None:
        """On any thread. A batch that is dropped before its lookup is forgotten."""
        with self._lock:
            self._expected.append(weakref.ref(batch))

    @override
    def follow(self, batch: BatchIds, lookups: Sequence[LookupBuffers], step: int) -> None:
        """Its rows, and those of the next batch, come to the device."""
        tier = self._memory.tier
        tier.join()
        self._held = lookups
        coming = self._next_ids(batch)
        with launch.beside(tier.stream, []):
            for at in lookups:
                assert isinstance(at.arena, TieredArena)
                self._exchange(at.arena, at, coming.pop(at.arena, None), step)
            for arena, ids in coming.items():
                self._exchange(arena, None, ids, step)
        tier.record()

    def _next_ids(self, batch: BatchIds) -> dict[TieredArena, NextIds]:
        """The ids of the batch that will be looked up next, by row layouts."""
        with self._lock:
            self._expected = [one for one in self._expected if one() is not None and one() is not batch]
            coming = self._expected[0]() if self._expected else None
        if coming is None:
            return {}
        found: dict[TieredArena, NextIds] = {}
        for layout in coming.layout.groups(training=False):
            arena = layout.arena
            assert isinstance(arena, TieredArena)
            has_moved = any(table.arena is not arena for table in layout.tables)
            if arena.has_host_rows and layout.positions and not has_moved:
                found[arena] = NextIds(layout, layout.describe(coming.ids))
        if self._memory.tier.stream is not None and found:
            coming.receive(self._memory.tier.stream)
        return found

    def _exchange(self, arena: TieredArena, at: LookupBuffers | None, ids: NextIds | None, step: int) -> None:
        """Queue an exchange on the tier's stream, which is the current one."""
        sizes = ExchangeSizes.of(at, ids)
        launches = self._launches.get(arena)
        if launches is None or not launches.fits(sizes):
            if launches is not None:
                sizes = ExchangeSizes(*map(max, sizes, launches.sizes))
                del self._launches[arena], launches  # their memory first
            launches = self._launches[arena] = ArenaExchange(self._memory, arena, sizes)
        with arena.pause():
            launches.run(at, ids, step)
