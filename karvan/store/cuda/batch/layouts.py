"""`BatchLayout`: all that follows from the sizes of a batch, made once for batches of the same sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from karvan.store.cuda.batch.batch_ids import FeatureShape, GroupLayout
from karvan.store.cuda.rows.arena import RowArena
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.rows.tables import DeviceTable

_MOST = 64  # layouts that are remembered


class BatchLayout:
    """The groups of a batch's features. It holds until the store's memory changes: see `valid`."""

    def __init__(self, memory: TableMemory, shapes: Sequence[FeatureShape]) -> None:
        self.shapes = tuple(shapes)
        self.tables: list[DeviceTable] = list({shape.table: None for shape in shapes})
        self.policies = [table for table in self.tables if table.spec.evict[0] != "never"]
        self.slots = 1 + max((shape.slot for shape in shapes), default=-1)
        self.touched = [False] * self.slots  # whether a table has ids, by its slot
        self._memory = memory
        self._epoch = memory.epoch
        self._groups: dict[bool, list[GroupLayout]] = {}
        self._by_arena: dict[RowArena, list[tuple[int, FeatureShape]]] = {}
        for number, shape in enumerate(shapes):
            self.touched[shape.slot] |= shape.cells > 0
            self._by_arena.setdefault(shape.table.arena, []).append((number, shape))

    @property
    def valid(self) -> bool:
        """Whether tables have the arenas that they had."""
        return self._epoch == self._memory.epoch

    def groups(self, training: bool) -> list[GroupLayout]:
        """The features by arena."""
        made = self._groups.get(training)
        if made is None:
            made = [GroupLayout(arena, own, training) for arena, own in self._by_arena.items()]
            self._groups[training] = made
        return made


class LayoutCache:
    """The layouts of recent batches; several threads may ask."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._lock = Lock()
        self._known: OrderedDict[tuple[FeatureShape, ...], BatchLayout] = OrderedDict()

    def find(self, shapes: tuple[FeatureShape, ...]) -> BatchLayout:
        """The layout of a batch of these sizes."""
        with self._lock:
            found = self._known.get(shapes)
            if found is None or not found.valid:
                found = self._known[shapes] = BatchLayout(self._memory, shapes)
                if len(self._known) > _MOST:
                    self._known.popitem(last=False)
            self._known.move_to_end(shapes)
            return found
