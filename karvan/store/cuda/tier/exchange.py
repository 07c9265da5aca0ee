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
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.batch.batch_ids import FeatureIds, GroupLayout
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.batch.layouts import BatchLayout
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.find import find_rows
from karvan.store.cuda.rows.index import WIDTH
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.tier import kernels
from karvan.store.cuda.tier.arena import TieredArena

_BLOCK = fields.BLOCK.value
_HEAD = kernels.EXCHANGE_HEAD.value
_COLUMNS = 128  # words of a location that a program copies at a time
_GROUPED = 1024  # words of all locations that it copies at a time


class BatchIds(Protocol):
    """A batch whose ids are on the device."""

    layout: BatchLayout
    ids: Sequence[FeatureIds]

    def receive(self, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream wait for the ids, and their memory for the stream."""


class _NextIds(NamedTuple):
    """Ids of the next batch whose rows are in one arena."""

    layout: GroupLayout
    descriptors: NDArray[np.int64]


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
        self._held: Sequence[LookupBuffers] = ()  # that the last exchange may still read

    def expect(self, batch: BatchIds) -> None:
        """See `NoExchange.expect`; on any thread. A batch that is dropped before its lookup is forgotten."""
        with self._lock:
            self._expected.append(weakref.ref(batch))

    def follow(self, batch: BatchIds, lookups: Sequence[LookupBuffers], step: int) -> None:
        """See `NoExchange.follow`: its rows, and those of the next batch, come to the device."""
        tier = self._memory.tier
        tier.join()
        self._held = lookups
        coming = self._next_ids(batch)
        for at in lookups:
            assert isinstance(at.arena, TieredArena)
            with launch.beside(tier.stream, []), at.arena.pause():
                self._exchange(at.arena, at, coming.pop(at.arena, None), step)
        for arena, ids in coming.items():
            with launch.beside(tier.stream, []), arena.pause():
                self._exchange(arena, None, ids, step)
        tier.record()

    def _next_ids(self, batch: BatchIds) -> dict[TieredArena, _NextIds]:
        """The ids of the batch that will be looked up next, by row layouts."""
        with self._lock:
            self._expected = [one for one in self._expected if one() is not None and one() is not batch]
            coming = self._expected[0]() if self._expected else None
        if coming is None:
            return {}
        found: dict[TieredArena, _NextIds] = {}
        for layout in coming.layout.groups(training=False):
            arena = layout.arena
            assert isinstance(arena, TieredArena)
            has_moved = any(table.arena is not arena for table in layout.tables)
            if arena.has_host_rows and layout.positions and not has_moved:
                found[arena] = _NextIds(layout, layout.describe(coming.ids))
        if self._memory.tier.stream is not None and found:
            coming.receive(self._memory.tier.stream)
        return found

    def _exchange(
        self, arena: TieredArena, at: LookupBuffers | None, ids: _NextIds | None, step: int
    ) -> None:
        """Queue an exchange for the rows of a lookup and those of the ids of the next one."""
        memory = self._memory
        arena.rounds += 1
        parts = [np.array([arena.rounds, step, arena.device_rows, arena.capacity], np.int64)]
        tables = memory.descriptors()
        if ids is not None:
            parts += [tables, ids.descriptors]
        head = memory.uploads.send(np.concatenate([part.reshape(-1) for part in parts]))
        here = 0 if at is None else at.shape.positions * _BLOCK
        there = 0 if ids is None else ids.layout.positions
        ints = launch.Workspace(
            torch.int32,
            memory.device,
            tally=kernels.TALLY.value,
            rows=there,
            feature_of=there // _BLOCK,
            listed=here + there,
            listed_tables=here + there,
        )
        most = min(here + there, arena.device_rows)
        pairs = launch.Workspace(torch.int64, memory.device, from_host=most, from_device=most)
        listing = (ints["tally"], ints["listed"], ints["listed_tables"])
        ints["tally"].zero_()
        if ids is not None:  # first: a row of both batches comes for the next one
            features = head[_HEAD + tables.size :]
            self._find(arena, ids.layout, head[_HEAD:], features, ints)
            rows, feature_of = ints["rows"], ints["feature_of"]
            self._collect(
                arena, there, rows, rows, rows, rows, features, feature_of, head, listing, runs=False
            )
        if at is not None:
            lookup = (at.run_rows, at.work, at.starts, at.order, at.features, at.feature_of)
            self._collect(arena, here, *lookup, head, listing, runs=True)
        if arena.has_host_rows:
            self._swap(arena, head, listing, pairs)

    def _find(
        self,
        arena: TieredArena,
        layout: GroupLayout,
        tables: Tensor,
        features: Tensor,
        ints: launch.Workspace,
    ) -> None:
        """The rows of positions; all of a feature's, also those that an output of some length leaves out."""
        memory, rows = self._memory, ints["rows"]
        find_rows[(layout.shape.positions,)](
            features,
            layout.shape.features,
            tables,
            memory.table_counters,
            memory.arena_counters(arena),
            arena.chunks,
            rows,
            rows,
            ints["feature_of"],
            rows,
            rows,
            rows,
            rows,
            tables,
            rows,
            memory.spare.data_ptr(),
            tables,
            FEATURES=launch.power(layout.shape.features),
            SHIFT=arena.shift,
            STRIDE=arena.layout.stride,
            WIDTH=WIDTH,
            INSERTS=False,
            MAPPED=False,
            GROWS=any(table.index.grows for table in layout.tables),
            num_warps=4,
        )

    def _collect(
        self,
        arena: TieredArena,
        size: int,
        rows: Tensor,
        work: Tensor,
        starts: Tensor,
        order: Tensor,
        features: Tensor,
        feature_of: Tensor,
        head: Tensor,
        listing: tuple[Tensor, Tensor, Tensor],
        *,
        runs: bool,
    ) -> None:
        memory = self._memory
        programs = min(memory.programs, size // _BLOCK)
        kernels.collect_rows[(programs,)](
            rows,
            size,
            work,
            starts,
            order,
            features,
            feature_of,
            head,
            arena.places,
            arena.marks,
            memory.table_counters,
            len(memory.tables),
            *listing,
            programs,
            RUNS=runs,
            num_warps=4,
        )

    def _swap(
        self,
        arena: TieredArena,
        head: Tensor,
        listing: tuple[Tensor, Tensor, Tensor],
        pairs: launch.Workspace,
    ) -> None:
        memory = self._memory
        tally, listed, listed_tables = listing
        programs = min(memory.programs, -(-listed.numel() // _BLOCK))
        kernels.choose_places[(programs,)](
            listed,
            listed_tables,
            head,
            arena.hand,
            arena.chunks,
            arena.places,
            arena.owners,
            arena.marks,
            memory.table_counters,
            tally,
            pairs["from_host"],
            pairs["from_device"],
            programs,
            STRIDE=arena.layout.stride,
            num_warps=4,
        )
        words = arena.row_bytes // 4
        columns = min(_COLUMNS, launch.power(words))
        programs = max(2, memory.processors)  # few: they wait for the bus, beside kernels that compute
        kernels.swap_rows[(programs,)](
            tally,
            pairs["from_host"],
            pairs["from_device"],
            programs,
            WORDS=words,
            COLUMNS=columns,
            GROUP=_GROUPED // columns,
            num_warps=4,
        )
