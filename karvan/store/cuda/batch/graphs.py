"""CUDA graphs of lookups and updates: what a step launches is recorded once, and replayed by one call.

A shape that comes a second time is recorded. A graph has buffers of its own; while a batch between lookup
and update uses them, another one of the same shape gets other buffers. Recording happens only for work that
is the same in every step: not while an index grows, nor for tables that do not admit every key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from karvan.store.cuda.batch.batch_ids import GroupShape
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.batch.updates import UpdateBuffers
from karvan.store.cuda.rows.arena import RowArena
from karvan.store.cuda.rows.table_memory import TableMemory

_MOST = 24  # recorded lookups
_SEEN = 256  # shapes that are remembered


class GraphedBuffers:
    """Buffers, the graph of their lookup, and those of their updates."""

    def __init__(self, buffers: LookupBuffers) -> None:
        self.buffers = buffers
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._updates: UpdateBuffers | None = None
        self.free = True

    def update_buffers(self, slots: int, features: int) -> UpdateBuffers:
        """The memory of updates of this lookup."""
        if self._updates is None:
            self._updates = UpdateBuffers(self.buffers, slots, features, mapped=self.buffers.mapped)
        return self._updates

    def replay(self, name: Hashable, work: Callable[[], None]) -> None:
        """Queue the work of that name, which is the same each time."""
        graph = self._graphs.get(name)
        if graph is None:
            graph = self._graphs[name] = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(self.buffers.memory.device)  # type: ignore[no-untyped-call]
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work()
        graph.replay()


class GraphPool:
    """The recorded lookups of a store."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._epoch = memory.epoch
        self._seen: OrderedDict[GroupShape, None] = OrderedDict()
        self._recorded: OrderedDict[GroupShape, list[GraphedBuffers]] = OrderedDict()

    def take(self, arena: RowArena, shape: GroupShape) -> GraphedBuffers | None:
        """Recorded buffers that are free; None if the launches of this lookup should not be recorded."""
        if self._memory.side is None or torch.cuda.is_current_stream_capturing():
            return None
        if self._epoch != self._memory.epoch:
            self._epoch = self._memory.epoch
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
            if entry.free:
                entry.free = False
                return entry
        if sum(map(len, self._recorded.values())) >= _MOST and not self._drop():
            return None
        entry = GraphedBuffers(LookupBuffers(self._memory, arena, shape))
        entry.free = False
        entries.append(entry)
        return entry

    def _drop(self) -> bool:
        """Release the recorded buffers that were not used for longest; whether any were free."""
        for shape, entries in self._recorded.items():
            for entry in entries:
                if entry.free:
                    entries.remove(entry)
                    if not entries:
                        del self._recorded[shape]
                    return True
        return False
