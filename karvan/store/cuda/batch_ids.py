"""The ids of a batch on a device, and how features become descriptors for the kernels.

Features whose tables have the same row layout are looked up together. Every id is a position; those of a
feature start at a multiple of `BLOCK`. Features that are plain, with one vector without a weight for each
output row, come first.

What follows from the sizes of a batch alone (`FeatureShape`, `GroupLayout`) is made once for all batches of
these sizes: of a step, the host has only addresses to write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.arena import RowArena, RowSpace
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.runs import PIECE, SPAN
from karvan.store.cuda.launch import Staging
from karvan.store.cuda.table_memory import DeviceTable, TableMemory
from karvan.store.program import OutputLayout

_BLOCK = fields.BLOCK.value
_FIELDS = fields.FEATURE_FIELDS.value
_VALUES, _OFFSETS, _WEIGHTS = fields.VALUES.value, fields.OFFSETS.value, fields.WEIGHTS.value
_OUT = fields.OUT.value
_NOWHERE = 1 << 62
_MODES = {"pooled": 0, "cells": 1, "padded": 2}
_COMBINERS = {"sum": 0, "mean": 1, "sqrtn": 2, "mean_by_count": 3}
_DENSITY = 5  # ids of a sample, see kDensity in csrc/batch/plan.h


class FeatureShape(NamedTuple):
    """A feature and the sizes of its ids in a batch."""

    slot: int  # of its table among those of the program
    table: DeviceTable
    mode: str
    combiner: str
    stack: int
    cells: int
    samples: int
    length: int
    ragged: bool  # whether there are offsets
    weighted: bool

    @property
    def positions(self) -> int:
        """How many keys it looks up."""
        return self.cells * self.stack

    @property
    def out_rows(self) -> int:
        """Rows of its output."""
        return OutputLayout(self.samples, self.cells, self.length, None).rows(self.mode)

    @property
    def combiner_number(self) -> int:
        """The combiner as kernels know it; the sizes of the batch decide on a mean by density."""
        if self.combiner == "mean_by_density":
            dense = self.cells > _DENSITY * (self.samples + 1)
            return _COMBINERS["mean_by_count" if dense else "mean"]
        return _COMBINERS[self.combiner]

    @property
    def plain(self) -> bool:
        """Whether each of its cells is one output row, without a weight."""
        if self.weighted or self.stack != 1:
            return False
        return self.mode == "cells" or (not self.ragged and (self.mode == "pooled" or self.length == 1))


class FeatureIds(NamedTuple):
    """A feature's ids in a batch, on the store's device."""

    values: Tensor  # int64, cells * stack of them
    offsets: Tensor | None = None
    weights: Tensor | None = None


def shape_of_keys(slot: int, table: DeviceTable, count: int) -> FeatureShape:
    """The shape of a feature that wants the vector of each of so many keys."""
    return FeatureShape(slot, table, "cells", "sum", 1, count, count, 1, False, False)


class GroupShape(NamedTuple):
    """The sizes of a group's launches, in blocks; groups of one shape can use one graph."""

    arena: int
    training: bool
    plain_features: int
    features: int
    positions: int
    plain: int  # blocks of positions of plain features
    samples: int  # blocks of samples of the other features
    outs: int  # blocks of output rows of the other features
    init_level: int  # the highest of its tables, see `DeviceTable.init_level`


class GroupLayout:
    """Where the features of a batch whose rows are in one arena have their positions and outputs."""

    def __init__(self, arena: RowSpace, features: Sequence[tuple[int, FeatureShape]], training: bool) -> None:
        self.arena = arena
        ordered = [feature for feature in features if feature[1].plain]
        self.plain_features = len(ordered)
        ordered += [feature for feature in features if not feature[1].plain]
        self.features = ordered  # with their numbers in the program
        self.numbers = [number for number, _ in ordered]
        self.bases: list[int] = []
        self.wanted: dict[DeviceTable, int] = {}  # how many rows of each table the group may insert
        blocks = plain = samples = outs = 0
        for at, (_, feature) in enumerate(ordered):
            self.bases.append(blocks * _BLOCK)
            blocks += -(-feature.positions // _BLOCK)
            self.wanted[feature.table] = self.wanted.get(feature.table, 0) + feature.positions
            if at < self.plain_features:
                plain = blocks
            else:
                samples += -(-feature.samples // _BLOCK)
                outs += -(-feature.out_rows // _BLOCK)
        self.plain_end = plain * _BLOCK
        self.shape = GroupShape(
            arena.number,
            training,
            self.plain_features,
            len(ordered),
            launch.coarse(blocks),
            launch.coarse(plain),
            launch.coarse(samples),
            launch.coarse(outs),
            max((feature.table.init_level for _, feature in ordered), default=0),
        )
        self.positions: int = self.shape.positions * _BLOCK  # with those that only fill blocks
        self.tables = list(self.wanted)
        self.slots = sorted({feature.slot for _, feature in ordered})
        self.admits_all = all(table.admits_all for table in self.tables)
        self._out_rows = [feature.out_rows for _, feature in ordered]
        self._out_size = (sum(self._out_rows), arena.layout.dim)
        self._aligned = arena.layout.dim % 4 == 0  # so that every output begins at a multiple of 16 bytes
        self._has_offsets = any(feature.ragged for _, feature in ordered)
        self._has_weights = any(feature.weighted for _, feature in ordered)
        self._constants = self._describe_constants()

    def _describe_constants(self) -> NDArray[np.int64]:
        """The descriptors of all features, without addresses."""
        descriptors = np.zeros((len(self.features), _FIELDS), np.int64)
        out_base = sample_base = 0
        for at, ((_, f), base) in enumerate(zip(self.features, self.bases, strict=True)):
            plain = at < self.plain_features
            row = descriptors[at]
            row[fields.CELLS.value] = f.cells
            row[fields.BASE.value] = base
            row[fields.TABLE.value] = f.table.number
            row[fields.SAMPLES.value] = f.samples
            row[fields.LENGTH.value] = f.length
            row[fields.STACK.value] = f.stack
            row[fields.MODE.value] = _MODES[f.mode]
            row[fields.COMBINER.value] = f.combiner_number
            row[fields.OUT_ROWS.value] = f.out_rows
            row[fields.OUT_BASE.value] = _NOWHERE if plain else out_base
            row[fields.SAMPLE_BASE.value] = _NOWHERE if plain else sample_base
            row[fields.SLOT.value] = f.slot
            if not plain:
                out_base += -(-f.out_rows // _BLOCK) * _BLOCK
                sample_base += -(-f.samples // _BLOCK) * _BLOCK
        return descriptors

    def outputs(self, device: torch.device) -> dict[int, Tensor]:
        """Memory for the outputs, by the features' numbers in the program.

        That of a training step is one allocation, which takes less of the host's time.
        """
        if self.shape.training and self._aligned:
            memory = torch.empty(self._out_size, dtype=torch.float32, device=device)
            parts = memory.unsafe_split_with_sizes(self._out_rows)  # not views: they may be written to
            return dict(zip(self.numbers, parts, strict=True))
        return {
            number: torch.empty(rows, self._out_size[1], dtype=torch.float32, device=device)
            for number, rows in zip(self.numbers, self._out_rows, strict=True)
        }

    def describe(
        self, ids: Sequence[FeatureIds], outs: Mapping[int, Tensor] | None = None
    ) -> NDArray[np.int64]:
        """The descriptors of all features; ids: of all features of the program. outs: of this group's."""
        numbers = self._constants.copy()
        numbers[:, _VALUES] = [ids[number].values.data_ptr() for number in self.numbers]
        if outs is not None:
            numbers[:, _OUT] = [outs[number].data_ptr() for number in self.numbers]
        if self._has_offsets:
            numbers[:, _OFFSETS] = [_address(ids[number].offsets) for number in self.numbers]
        if self._has_weights:
            numbers[:, _WEIGHTS] = [_address(ids[number].weights) for number in self.numbers]
        return numbers

    def of_features(self, gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Those of the program's gradients that there are for these features, by the features' numbers."""
        return {number: g for number in self.numbers if (g := gradients[number]) is not None}

    def spread(self, uses: Mapping[int, Tensor], device: torch.device) -> Tensor:
        """The uses of positions, from those of the features' ids."""
        positions = torch.zeros(self.positions, dtype=torch.int32, device=device)
        sizes = np.array([feature.positions for _, feature in self.features], np.int64)
        total = int(sizes.sum())
        if total:
            shifts = torch.from_numpy(np.array(self.bases) - (np.cumsum(sizes) - sizes)).to(device)
            shift = shifts.repeat_interleave(torch.from_numpy(sizes).to(device), output_size=total)
            at = torch.arange(total, device=device) + shift
            positions[at] = torch.cat([uses[number] for number in self.numbers])
        return positions


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# `BatchLayout`: all that follows from the sizes of a batch, made once for batches of the same sizes.


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
        layouts = self._groups.get(training)
        if layouts is None:
            layouts = [GroupLayout(arena, features, training) for arena, features in self._by_arena.items()]
            self._groups[training] = layouts
        return layouts


class LayoutCache:
    """The layouts of recent batches; several threads may ask."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._lock = Lock()
        self._known: OrderedDict[tuple[FeatureShape, ...], BatchLayout] = OrderedDict()

    def find(self, shapes: tuple[FeatureShape, ...]) -> BatchLayout:
        """The layout of a batch of these sizes."""
        with self._lock:
            shape_layout = self._known.get(shapes)
            if shape_layout is None or not shape_layout.valid:
                shape_layout = self._known[shapes] = BatchLayout(self._memory, shapes)
                if len(self._known) > _MOST:
                    self._known.popitem(last=False)
            self._known.move_to_end(shapes)
            return shape_layout


# `LookupBuffers`: the memory that a lookup works in, from its keys to the update of its rows.
#
# Launches take all they need from it. A graph of them can therefore be replayed for another batch of the same
# shape, once the batch's descriptors are in its buffers (`graphs.py`).

_HEAD = fields.HEAD.value


class LookupBuffers:
    """The memory of one lookup, from its keys to the update of its rows."""

    def __init__(self, memory: TableMemory, arena: RowSpace, shape: GroupShape) -> None:
        self.memory = memory
        self.arena = arena
        self.shape = shape
        size = shape.positions * _BLOCK
        training = size if shape.training else 1
        self.mapped = shape.features > shape.plain_features
        self.most_pieces = size // (int(PIECE.value) // 2) + 1
        self.spans = -(-size // int(SPAN.value))
        device = memory.device
        sizes = [size, size // _BLOCK, fields.WORK.value, size if self.mapped else 1]
        sizes += 3 * [training] + 3 * [size + 1] + 3 * [self.most_pieces] + [self.spans]
        ints = launch.arrays(torch.int32, device, sizes)
        self.rows, self.feature_of, self.work, self.out_rows = ints[:4]
        self.fresh, self.fresh_tables, self.pending = ints[4:7]
        self.starts, self.run_rows, self.run_pieces = ints[7:10]
        self.long_runs, self.piece_starts, self.piece_ends, self.span_runs = ints[10:]
        self.order = torch.empty(0, dtype=torch.int64, device=device)
        self.factors = torch.empty(size if self.mapped else 1, dtype=torch.float32, device=device)
        tables = len(memory.tables) * fields.TABLE_FIELDS.value
        sizes = [training, _HEAD + tables + shape.features * _FIELDS]
        self.places, sent = launch.arrays(torch.int64, device, sizes)
        self.sent = sent
        self.head, self.tables, self.features = sent, sent[_HEAD:], sent[_HEAD + tables :]
        self.others = self.features[shape.plain_features * _FIELDS :]
        self.shared = [self.rows, sent]  # one array of each allocation
        self.staging: Staging | None = None  # of a graph, which copies `sent` itself
        self.missing: Tensor | None = None  # positions of tables that do not admit every key
        self.uses: Tensor | None = None  # of each position; None: one

    def load(self, layout: GroupLayout, descriptors: NDArray[np.int64], step: int) -> None:
        """Send a batch to the device."""
        staging = self.staging
        numbers = np.empty(self.sent.numel(), np.int64) if staging is None else staging.numbers()
        numbers[fields.STEP.value] = step
        numbers[fields.PLAIN_END.value] = layout.plain_end
        tables = self.memory.descriptors()
        end = _HEAD + tables.size
        numbers[_HEAD:end] = tables.reshape(-1)
        numbers[end : end + descriptors.size] = descriptors.reshape(-1)
        if staging is None:
            self.memory.uploads.send_to(self.sent, numbers)
