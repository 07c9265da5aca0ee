"""Hot rows come to the device: the exchange that follows the lookup of each training batch.

It is queued on a stream of its own, beside the dense forward and backward, and uses what the lookup has
found: the batch's distinct rows. Of the batch that was prepared to be next, it finds the rows, without those
of unknown keys, and brings them as well, so that the next lookup meets them on the device. Whatever touches
rows or indexes after that, on any stream, waits for the exchange first (`TierStream.join`). Captures that
read rows in the background pause for it (`RowArena.pause`).
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.devices import record
from karvan.store.cuda import launch
from karvan.store.cuda.arena import TieredArena
from karvan.store.cuda.batch_ids import BatchLayout, FeatureIds, GroupLayout, LookupBuffers
from karvan.store.cuda.kernels import exchange, fields
from karvan.store.cuda.kernels.find import find_rows
from karvan.store.cuda.table_memory import TableMemory

# `ArenaExchange`: the launches of one arena's exchanges, the memory that they work in, and graphs of them.
#
# An exchange has two parts. The first lists rows of the next batch; what it launches depends on that batch's
# shape only. The second lists rows of the lookup that it follows, and exchanges all that are listed; what it
# launches depends on the lookup's buffers only. Each part has graphs of its own, so there are not as many as
# pairs of shapes. All numbers that vary are uploaded before.
#
# Exchanges come one after the other on the tier's stream, so they share their memory. It is allocated on that
# stream and used by no other: what is dropped here can be used again by later work on it.


_BLOCK = fields.BLOCK.value
_HEAD = exchange.EXCHANGE_HEAD.value
_COLUMNS = 128  # words of a location that a program copies at a time
_GROUPED = 1024  # words of all locations that it copies at a time
_MOST = 64  # parts of exchanges that are remembered, with their graphs


class NextIds(NamedTuple):
    """Ids of the next batch whose rows are in one arena."""

    layout: GroupLayout
    descriptors: NDArray[np.int64]


class ExchangeSizes(NamedTuple):
    """Sizes of exchanges that have room in some memory."""

    positions: int  # of the lookup
    next_positions: int  # of the next batch
    next_features: int

    @classmethod
    def of(cls, at: LookupBuffers | None, ids: NextIds | None) -> ExchangeSizes:
        """The sizes of one exchange."""
        positions = 0 if at is None else at.shape.positions * _BLOCK
        if ids is None:
            return cls(positions, 0, 0)
        return cls(positions, ids.layout.positions, ids.layout.shape.features)


class ArenaExchange:
    """Exchanges of an arena, up to some sizes. It is made on the tier's stream, as `run` is called."""

    def __init__(self, memory: TableMemory, arena: TieredArena, sizes: ExchangeSizes) -> None:
        self.sizes = sizes
        self._memory = memory
        self._arena = arena
        self._epoch = memory.epoch
        self._swaps = arena.has_host_rows
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph | None] = OrderedDict()
        listed = sizes.positions + sizes.next_positions
        rows = [sizes.next_positions, sizes.next_positions // _BLOCK]
        ints = launch.arrays(torch.int32, memory.device, [exchange.TALLY.value, *rows, listed, listed])
        self._tally, self._rows, self._feature_of, self._listed, self._listed_tables = ints
        # Once there are rows on the host, there are no more locations on the device than now.
        most = min(listed, arena.device_rows) if self._swaps else 0
        self._from_host, self._from_device = launch.arrays(torch.int64, memory.device, [most, most])
        self._tables_end = _HEAD + len(memory.tables) * fields.TABLE_FIELDS.value
        size = self._tables_end + sizes.next_features * fields.FEATURE_FIELDS.value
        self._numbers = np.empty(size, np.int64)
        self._head = torch.empty(size, dtype=torch.int64, device=memory.device)
        self._tables, self._features = self._head[_HEAD:], self._head[self._tables_end :]

    def fits(self, sizes: ExchangeSizes) -> bool:
        """Whether it has room for an exchange, and what its graphs point to is still in use."""
        return (
            self._epoch == self._memory.epoch
            and self._swaps == self._arena.has_host_rows
            and all(map(operator.le, sizes, self.sizes))
        )

    def run(self, at: LookupBuffers | None, ids: NextIds | None, step: int) -> None:
        """Queue an exchange for the rows of a lookup and those of the ids of the next one."""
        self._send(ids, step)
        if ids is not None:  # first: a row of both batches comes for the next one
            layout = ids.layout
            grows = any(table.index.grows for table in layout.tables)
            shape = None if grows else (layout.shape.features, layout.shape.positions)
            self._queue(shape, lambda: self._list_next(layout, grows))
        begins = ids is None
        stays = at is None or at.staging is not None  # whether the lookup's buffers are those of a graph
        name = (None if at is None else weakref.ref(at), begins) if stays else None
        self._queue(name, lambda: self._list_and_swap(at, begins))

    def _send(self, ids: NextIds | None, step: int) -> None:
        """Upload what varies."""
        memory, arena, numbers, end = self._memory, self._arena, self._numbers, _HEAD
        arena.rounds += 1
        numbers[:end] = (arena.rounds, step, arena.device_rows, arena.capacity)
        if ids is not None:
            numbers[_HEAD : self._tables_end] = memory.descriptors().reshape(-1)
            end = self._tables_end + ids.descriptors.size
            numbers[self._tables_end : end] = ids.descriptors.reshape(-1)
        memory.uploads.send_to(self._head, numbers[:end])

    def _queue(self, name: Hashable | None, work: Callable[[], None]) -> None:
        """Run a part of an exchange, by a graph if it has a name and has run before.

        It is recorded the second time: the first launch of a kernel loads it, which must not happen then.
        """
        graphs, stream = self._graphs, self._memory.streams.recording
        if name is None or stream is None:
            work()
            return
        if name not in graphs:
            work()
            graphs[name] = None
            if len(graphs) > _MOST:
                graphs.popitem(last=False)  # CUDA releases a graph that is in flight when it is done
            return
        graphs.move_to_end(name)
        graph = graphs[name]
        if graph is None:
            graph = graphs[name] = record(stream, work)
        graph.replay()

    def _list_next(self, layout: GroupLayout, grows: bool) -> None:
        """Begin with the rows of the next batch; all of a feature's, whatever the length of its output."""
        memory, arena, rows, tables = self._memory, self._arena, self._rows, self._tables
        self._tally.zero_()
        reads = (self._features, layout.shape.features, tables, memory.table_counters)
        unused = (rows, rows, rows, rows, tables, rows)  # what only insertions read and write
        find_rows[(layout.shape.positions,)](
            *(*reads, memory.arena_counters(arena), arena.chunks, rows, rows, self._feature_of),
            *(*unused, memory.spare.data_ptr(), tables),
            FEATURES=launch.power(layout.shape.features),
            **arena.constants("SHIFT", "STRIDE"),
            **{"INSERTS": False, "MAPPED": False, "GROWS": grows},
            num_warps=4,
        )
        positions = (rows, layout.positions, rows, rows, rows, self._features, self._feature_of)
        self._collect(layout.positions, positions, runs=False)

    def _list_and_swap(self, at: LookupBuffers | None, begins: bool) -> None:
        """Add the rows of a lookup, and exchange what is listed; begins: there is no next batch."""
        if begins:
            self._tally.zero_()
        if at is not None:
            size = at.shape.positions * _BLOCK
            reads = (at.run_rows, size, at.work, at.starts, at.order, at.features, at.feature_of)
            self._collect(size, reads, runs=True)
        if self._swaps:
            self._swap()

    def _collect(self, size: int, reads: tuple[Tensor | int, ...], *, runs: bool) -> None:
        memory, arena = self._memory, self._arena
        marks = (self._head, arena.places, arena.marks, memory.table_counters, len(memory.tables))
        exchange.collect_rows[(min(memory.programs, size // _BLOCK),)](
            *(*reads, *marks, self._tally, self._listed, self._listed_tables), RUNS=runs, num_warps=4
        )

    def _swap(self) -> None:
        memory, arena = self._memory, self._arena
        programs = min(memory.programs, -(-self._listed.numel() // _BLOCK))
        pairs = (self._tally, self._from_host, self._from_device)
        places = (arena.hand, arena.chunks, arena.places, arena.owners, arena.marks, memory.table_counters)
        exchange.choose_places[(programs,)](
            *(self._listed, self._listed_tables, self._head, *places, *pairs),
            **arena.constants("STRIDE"),
            num_warps=4,
        )
        words = arena.row_bytes // 4
        columns = min(_COLUMNS, launch.power(words))
        programs = max(2, memory.processors)  # few: they wait for the bus, beside kernels that compute
        shape = {"WORDS": words, "COLUMNS": columns, "GROUP": _GROUPED // columns}
        exchange.swap_rows[(programs,)](*pairs, **shape, num_warps=4)


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
            self._expected = [
                reference
                for reference in self._expected
                if reference() is not None and reference() is not batch
            ]
            coming = self._expected[0]() if self._expected else None
        if coming is None:
            return {}
        next_ids: dict[TieredArena, NextIds] = {}
        for layout in coming.layout.groups(training=False):
            arena = layout.arena
            assert isinstance(arena, TieredArena)
            has_moved = any(table.arena is not arena for table in layout.tables)
            if arena.has_host_rows and layout.positions and not has_moved:
                next_ids[arena] = NextIds(layout, layout.describe(coming.ids))
        if self._memory.tier.stream is not None and next_ids:
            coming.receive(self._memory.tier.stream)
        return next_ids

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
