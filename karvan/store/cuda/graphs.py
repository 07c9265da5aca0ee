"""CUDA graphs of lookups and updates: what a step launches is recorded once, and replayed by one call.

A shape that comes a second time is recorded. A graph has buffers of its own; while a batch between lookup
and update uses them, another one of the same shape gets other buffers. Recording happens only for work that
is the same in every step: not while an index grows, nor for tables that do not admit every key.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from karvan.devices import record
from karvan.store.cuda import lookup as launches
from karvan.store.cuda.arena import RowArena
from karvan.store.cuda.batch_ids import GroupShape, LookupBuffers
from karvan.store.cuda.launch import Staging
from karvan.store.cuda.table_memory import TableMemory
from karvan.store.cuda.updates import SlotRules, UpdateBuffers

_MOST = 24  # recorded lookups
_TURNS = 3  # recorded lookups of a shape that take turns, so that the host can be ahead of the device
_SEEN = 256  # shapes that are remembered


class GraphedBuffers:
    """Buffers, the graph of their lookup, and those of their updates.

    A graph begins with the copy of its batch's descriptors to the device. That of a lookup ends with a copy
    of the counters to the host.

    launched: kinds of updates that have run without a graph. The first launch of a kernel loads it, which
    must not happen while a graph is recorded.
    """

    def __init__(self, buffers: LookupBuffers, launched: set[Hashable]) -> None:
        self.buffers = buffers
        self._epoch = buffers.memory.epoch
        self.staging = buffers.staging = Staging(buffers.sent)
        counters = buffers.memory.counters.values
        self._report = torch.empty(counters.numel(), dtype=torch.int64, pin_memory=True)
        self._reported = self._report.numpy()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._launched = launched
        self._updates: dict[tuple[int, int], UpdateBuffers] = {}
        self.free = True

    @property
    def idle(self) -> bool:
        """Whether no lookup uses the buffers, and no replay reads or writes their page-locked memory."""
        events = [self.staging.done, *(sums.staging.done for sums in self._updates.values() if sums.staging)]
        return self.free and all(event.query() for event in events)  # type: ignore[no-untyped-call]

    @property
    def valid(self) -> bool:
        """Whether the memory that the graphs point to is still in use."""
        return self._epoch == self.buffers.memory.epoch

    def look_up(self) -> None:
        """Queue the lookup of the batch that was loaded into the buffers."""
        self._replay("lookup", self._record_lookup)  # a lookup of this shape has run before
        self.staging.done.record()
        self.buffers.memory.counters.note_copy(self._report, self._reported, self.staging.done)

    def _record_lookup(self) -> None:
        self.staging.copy()
        launches.run(self.buffers)
        self._report.copy_(self.buffers.memory.counters.values, non_blocking=True)

    def update_buffers(self, slots: int, features: int) -> UpdateBuffers:
        """The memory of updates of this lookup."""
        update = self._updates.get((slots, features))
        if update is None:
            update = UpdateBuffers(self.buffers, slots, features, mapped=self.buffers.mapped)
            update.staging = Staging(update.sent)
            self._updates[slots, features] = update
        return update

    def update(self, sums: UpdateBuffers, rules: SlotRules, aligned: bool, *, drops: bool) -> None:
        """Queue an update by what was loaded into `sums`; drops: rows may be gone since the lookup."""
        staging = sums.staging
        assert staging is not None

        def work() -> None:
            staging.copy()
            if drops:
                sums.drop_runs()
            sums.run(rules, aligned)

        kind = (rules.kinds, rules.limits, rules.same, aligned, drops)
        kernels = (self.buffers.arena.number, self.buffers.mapped, rules.slots, kind)
        if kernels in self._launched:
            self._replay((id(sums), kind), work)
        else:
            self._launched.add(kernels)
            work()
        staging.done.record()

    def _replay(self, name: Hashable, work: Callable[[], None]) -> None:
        self.buffers.memory.tier.join()
        graph = self._graphs.get(name)
        if graph is None:
            graph = self._graphs[name] = record(self.buffers.memory.streams.recording, work)
        graph.replay()


class GraphPool:
    """The recorded lookups of a store."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._epoch = memory.epoch
        self._seen: OrderedDict[GroupShape, None] = OrderedDict()
        self._recorded: OrderedDict[GroupShape, list[GraphedBuffers]] = OrderedDict()
        self._launched: set[Hashable] = set()
        self._retired: list[GraphedBuffers] = []  # torch's allocator does not know of replays that use them

    def take(self, arena: RowArena, shape: GroupShape) -> GraphedBuffers | None:
        """Recorded buffers that are free; None if the launches of this lookup should not be recorded."""
        if self._memory.streams.recording is None:
            return None
        if self._retired:
            self._retired = [entry for entry in self._retired if not entry.idle]
        if self._epoch != self._memory.epoch:
            self._epoch = self._memory.epoch
            self._retired += itertools.chain.from_iterable(self._recorded.values())
            self._recorded.clear()
            self._seen.clear()
        if shape not in self._seen:
            self._seen[shape] = None
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
            return None
        entries = self._recorded.setdefault(shape, [])
        self._recorded.move_to_end(shape)
        for entry in entries:
            if entry.idle:
                entry.free = False
                return entry
        free = [entry for entry in entries if entry.free]
        full = len(entries) >= _TURNS or sum(map(len, self._recorded.values())) >= _MOST
        if free and full:  # the host is far ahead of the device: wait for the one that was used first
            entries.remove(free[0])
            entries.append(free[0])
            free[0].free = False
            return free[0]
        if full and not self._drop():
            return None
        entry = GraphedBuffers(LookupBuffers(self._memory, arena, shape), self._launched)
        entry.free = False
        entries.append(entry)
        return entry

    def _drop(self) -> bool:
        """Retire the recorded buffers that were not used for longest; whether any were free."""
        for shape, entries in self._recorded.items():
            for entry in entries:
                if entry.free:
                    entries.remove(entry)
                    self._retired.append(entry)
                    if not entries:
                        del self._recorded[shape]
                    return True
        return False
