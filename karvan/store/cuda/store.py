"""`CudaStore`: tables in the memory of a GPU.

A training step is a few kernels for all tables together, queued without waiting for the device: find and
insert rows, fill outputs, group positions by row beside that, then sum gradients and update rows at once.
Results are the same from run to run: sums have the order of the batch.

Kernels read all addresses and sizes from descriptors in device memory, so the launches of a step are the same
for every batch of about the same shape, and are replayed as CUDA graphs. The host never waits to learn how
many rows there are: it works with upper bounds (`arena.py`). Rows of one layout are numbered over all
tables, and note the version of their birth: by it a gradient of an erased row is recognised even if its
number belongs to another key, or another table, by now.

Unlike in memory, a gradient that is not finite skips its row, not its table: to check all gradients first
would read them twice. A table at the capacity of its policy waits for its lookup before the update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from karvan.store.base import Store
from karvan.store.cuda import contents, launch
from karvan.store.cuda import lookup as launches
from karvan.store.cuda.arena import RowArena, RowSpace
from karvan.store.cuda.batch_ids import (
    BatchLayout,
    FeatureIds,
    FeatureShape,
    GroupLayout,
    LayoutCache,
    LookupBuffers,
    shape_of_keys,
)
from karvan.store.cuda.captures import DeviceCapture
from karvan.store.cuda.exchange import NoExchange, RowExchange
from karvan.store.cuda.gradients import GroupGradients, GroupLookup, update_group, without_moved
from karvan.store.cuda.graphs import GraphPool
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.table import CudaTable
from karvan.store.cuda.table_memory import DeviceTable, TableMemory, memory_report, next_versions
from karvan.store.cuda.updates import SlotRules, check_state
from karvan.store.program import (
    FeatureTensors,
    LookupInputs,
    LookupPlan,
    LookupProgram,
    MadeOutputs,
    OutputLayout,
    Passes,
    Prepared,
)
from karvan.store.types import (
    Capture,
    Counts,
    Found,
    Keys,
    LateGradients,
    LookupContext,
    PerTable,
    Push,
    Rules,
    TableSpec,
)

# Whole batches on a device: from ids to outputs, and from gradients to updated rows.


@dataclass(eq=False)
class DeviceInputs:
    """A batch whose ids are on the store's device.

    uses: how many of its key each id counts as, by the features' numbers; None: one. outs: memory for the
    outputs, likewise; None: they are allocated.
    """

    plan: ClassVar[None] = None
    layout: BatchLayout
    ids: Sequence[FeatureIds]
    out_layouts: Sequence[OutputLayout]
    uses: Mapping[int, Tensor] | None = None
    outs: Mapping[int, Tensor] | None = None
    _made: launch.Handover | None = None

    def note_stream(self, device: torch.device) -> None:
        """The ids were made by work on the current stream; another one may be that of the lookup."""
        self._made = launch.Handover(device, chain.from_iterable(self.ids))

    def receive(self, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream, or the current one, wait for the ids, and their memory for the stream."""
        if self._made is not None:
            self._made.receive(stream)


@dataclass(eq=False)
class DeviceLookup(MadeOutputs):
    """A batch after its lookup: a `GroupLookup` for each row layout."""

    layout: BatchLayout
    groups: Sequence[GroupLookup]


@dataclass(eq=False)
class DeviceGradients(LateGradients):
    """The gradients of a lookup's outputs. Whether they are finite is only known when they are applied."""

    groups: Sequence[GroupGradients]

    def check_finite(self) -> list[bool]:
        """Whether the gradients of each table are finite; waits for the device."""
        finite = list(self.finite())
        flags = [(slot, torch.isfinite(gradient).all()) for slot, gradient in self._by_slot()]
        goods = torch.stack([flag for _, flag in flags]).tolist() if flags else ()
        for (slot, _), good in zip(flags, goods, strict=True):
            finite[slot] &= good
        return finite

    @override
    def tensors(self, slots: Collection[int]) -> list[Tensor]:
        return [gradient for slot, gradient in self._by_slot() if slot in slots]

    def _by_slot(self) -> Iterator[tuple[int, Tensor]]:
        """The gradients with the slots of their tables."""
        for group in self.groups:
            for number, feature in group.lookup.layout.features:
                if number in group.gradients:
                    yield feature.slot, group.gradients[number]

    @override
    def skip_if(self, found_inf: Tensor) -> None:
        for group in self.groups:
            group.unless = found_inf


class _ProgramShapes:
    """The sizes of the last batch of a program: mostly the next one has the same."""

    def __init__(self, program: LookupProgram, memory: TableMemory) -> None:
        slots = {name: slot for slot, name in enumerate(program.tables)}
        self.features = [(spec, slots[spec.table], memory.tables[spec.table]) for spec in program.features]
        self.shapes: list[FeatureShape | None] = [None] * len(self.features)
        self.layout: BatchLayout | None = None


class CudaStore(Store):
    """Tables on one device; on "cpu" the kernels run in Triton's interpreter, for tests.

    device_memory: the most bytes that rows take on the device. Rows beyond it are in the memory of the
    machine, where the kernels read and write them as well, and hot ones come to the device (`exchange.py`).
    """

    takes_tensors = True

    def __init__(self, device: torch.device | str = "cuda", device_memory: int | None = None) -> None:
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
        self.device = chosen
        self.memory = TableMemory(chosen, device_memory)  # tables, rows and counters
        self._tables: dict[str, CudaTable] = {}
        self._graphs = GraphPool(self.memory)
        self._layouts = LayoutCache(self.memory)
        self._programs: WeakKeyDictionary[LookupProgram, _ProgramShapes] = WeakKeyDictionary()
        self._exchange = NoExchange() if device_memory is None else RowExchange(self.memory)

    @override
    def add_table(self, spec: TableSpec) -> None:
        self.memory.add(spec)
        if spec.name not in self._tables:
            self._tables[spec.name] = CudaTable(self.memory, self.memory.tables[spec.name])

    @override
    def table(self, name: str) -> CudaTable:
        return self._tables[name]

    @override
    def prepare(
        self, program: LookupProgram, inputs: LookupInputs, context: LookupContext | None = None
    ) -> DeviceInputs:
        """Moves ids to the device."""
        assert isinstance(inputs, tuple)
        batch = self._to_device(program, inputs)
        batch.note_stream(self.device)
        if context is not None and context.training:
            self._exchange.expect(batch)
        return batch

    def _to_device(self, program: LookupProgram, inputs: Sequence[FeatureTensors]) -> DeviceInputs:
        """Move ids to the device, and check what the host can see of them."""
        device = self.device
        last = self._programs.get(program)
        if last is None:
            last = self._programs[program] = _ProgramShapes(program, self.memory)
        ids: list[FeatureIds] = []
        out_layouts: list[OutputLayout] = []
        shapes: list[FeatureShape] = []
        for (spec, slot, table), shape, tensors in zip(last.features, last.shapes, inputs, strict=True):
            keys, weights, out_layout = tensors
            samples, cells, length, offsets = out_layout[:4]
            sizes = (cells, samples, length, offsets is not None, weights is not None)
            if shape is None or shape[-5:] != sizes:
                if offsets is None and cells != samples:
                    raise ValueError(
                        f"{spec.title} expected one id for each of {samples} samples, got {cells} ids."
                    )
                shape = FeatureShape(slot, table, spec.mode, spec.combiner, spec.stack, *sizes)
            shapes.append(shape)
            if offsets is not None:
                if offsets.is_cpu:
                    _check_offsets(spec.title, offsets, cells)
                offsets = offsets.to(device, non_blocking=True)
                out_layout = out_layout._replace(offsets=offsets)
            if weights is not None:
                weights = weights.to(device, non_blocking=True)
            if keys.device != device:
                keys = keys.to(device, non_blocking=True)
            ids.append(FeatureIds(keys, offsets, weights))
            out_layouts.append(out_layout)
        layout = last.layout
        if layout is None or not layout.valid or shapes != last.shapes:
            layout = self._layouts.find(tuple(shapes))
            last.shapes, last.layout = list(shapes), layout
        return DeviceInputs(layout, ids, out_layouts)

    def inputs_of(
        self,
        shapes: Sequence[FeatureShape],
        ids: Sequence[FeatureIds],
        uses: Mapping[int, Tensor] | None = None,
        outs: Mapping[int, Tensor] | None = None,
    ) -> DeviceInputs:
        """A batch of keys that are on the device; see `DeviceInputs`."""
        out_layouts = [OutputLayout(shape.samples, shape.cells, shape.length, None) for shape in shapes]
        return DeviceInputs(self._layouts.find(tuple(shapes)), ids, out_layouts, uses, outs)

    def expect(self, batch: DeviceInputs) -> None:
        """A batch was made on the current stream for a training lookup, which comes after some others."""
        batch.note_stream(self.device)
        self._exchange.expect(batch)

    @override
    def forward(
        self, program: LookupProgram, inputs: LookupInputs | Prepared, context: LookupContext
    ) -> LookupPlan:
        batch = self._to_device(program, inputs) if isinstance(inputs, tuple) else inputs
        assert isinstance(batch, DeviceInputs)
        versions, lookup = self._look_up(batch, context)
        return LookupPlan(None, versions, lookup)

    def _look_up(self, batch: DeviceInputs, context: LookupContext) -> tuple[Mapping[str, int], DeviceLookup]:
        """Look up a batch and fill its outputs; returns the tables' versions, too."""
        memory, layout = self.memory, batch.layout
        training, step = context.training, context.step
        memory.streams.refuse_graph()
        memory.poll()
        batch.receive()
        if not layout.valid:
            layout = batch.layout = self._layouts.find(layout.shapes)
        with memory_report(memory):
            contents.settle(memory)
            outs: dict[int, Tensor] = {}
            groups = [self._look_up_group(g, batch, outs, training, step) for g in layout.groups(training)]
            if training:
                for table in layout.policies:
                    contents.maintain(memory, table, step, context.now)
                buffers = [group.buffers for group in groups if group.layout.positions]
                self._exchange.follow(batch, buffers, step)
        versions = {table.spec.name: table.version for table in layout.tables}
        return versions, DeviceLookup(outs, batch.out_layouts, layout, groups)

    def _look_up_group(
        self, layout: GroupLayout, batch: DeviceInputs, made: dict[int, Tensor], training: bool, step: int
    ) -> GroupLookup:
        """Look up the features of one row layout, and add their outputs to those that were made."""
        memory, uses, arena = self.memory, batch.uses, layout.arena
        assert isinstance(arena, RowArena)
        if training:
            next_versions(layout.tables)
            memory.reserve(arena, layout.wanted)
        if batch.outs is None:
            outs = layout.outputs(memory.device)
        else:
            outs = {number: batch.outs[number] for number in layout.numbers}
        made.update(outs)
        descriptors = layout.describe(batch.ids, outs)
        steady = uses is None and layout.admits_all and not any(t.index.grows for t in layout.tables)
        graphed = self._graphs.take(arena, layout.shape) if steady and layout.positions else None
        buffers = LookupBuffers(memory, arena, layout.shape) if graphed is None else graphed.buffers
        lookup = GroupLookup(layout, arena.newest_version, descriptors, buffers, graphed)
        if not layout.positions:
            for out in outs.values():
                out.zero_()
            return lookup
        buffers.load(layout, descriptors, step)
        if training:
            memory.note_lookup(layout.wanted)
        if graphed is not None:
            graphed.look_up()
        else:
            if uses is not None:
                buffers.uses = layout.spread(uses, memory.device)
            if training and not layout.admits_all:
                buffers.missing = torch.empty(layout.positions, dtype=torch.int32, device=memory.device)
            launches.run(buffers, layout)
        if training and graphed is None:
            memory.counters.request_if_idle()
        return lookup

    @override
    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> DeviceGradients:
        lookup = plan.remote
        assert isinstance(lookup, DeviceLookup)
        touched = list(lookup.layout.touched)
        if any(gradient is None for gradient in gradients):
            touched = [False] * len(touched)
            for shape, gradient in zip(lookup.layout.shapes, gradients, strict=True):
                touched[shape.slot] |= gradient is not None and shape.cells > 0
        groups = [
            GroupGradients(group, group.layout.of_features(gradients), scale) for group in lookup.groups
        ]
        return DeviceGradients([True] * len(touched), touched, groups)

    @override
    def update(
        self, program: LookupProgram, gradients: Passes[DeviceGradients], rules: Rules, steps: PerTable
    ) -> None:
        self.memory.streams.refuse_graph()
        with memory_report(self.memory):
            contents.settle(self.memory)
        updated = [self.memory.tables[name] for name in rules]
        for table in updated:
            check_state(table, rules[table.spec.name])
        tables = program.tables
        chosen = SlotRules([rules.get(name) for name in tables], [steps.get(name, 0) for name in tables])
        by_arena: dict[RowSpace, list[GroupGradients]] = {}
        for _, gradient in gradients:
            for group in map(without_moved, gradient.groups):
                if group.gradients:
                    by_arena.setdefault(group.lookup.layout.arena, []).append(group)
        with memory_report(self.memory):
            for groups in by_arena.values():
                update_group(groups, chosen)
        next_versions(updated)

    @override
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        _, lookup = self._look_up(self.inputs_of_keys(keys), context)
        return {
            name: Found(out.cpu().numpy(), self.table(name).version)
            for name, (out, _) in zip(keys, lookup.take(), strict=True)
        }

    def inputs_of_keys(self, keys: Mapping[str, tuple[Keys, Counts]]) -> DeviceInputs:
        """A batch of distinct keys of tables, with how often each occurs; the tables are the slots."""
        uses, shapes, ids = {}, [], []
        for slot, (name, (unique, counts)) in enumerate(keys.items()):
            numbers = np.ascontiguousarray(counts, np.uint32).view(np.int32)
            uses[slot] = torch.from_numpy(numbers).to(self.device)
            shapes.append(shape_of_keys(slot, self.table(name).settled, len(unique)))
            ids.append(self._ids_of(unique))
        return self.inputs_of(shapes, ids, uses)

    def _ids_of(self, keys: Keys) -> FeatureIds:
        return FeatureIds(torch.from_numpy(np.ascontiguousarray(keys, np.int64)).to(self.device))

    @override
    def apply(self, pushes: Mapping[str, Sequence[Push]], rules: Rules, steps: PerTable) -> None:
        for name, its in pushes.items():
            table = self.table(name).settled
            check_state(table, rules[name])
            passes = [self._of_push(table, push) for push in its if len(push.keys)]
            if passes:
                update_group(passes, SlotRules([rules[name]], [steps[name]]))
            table.next_version()

    def _of_push(self, table: DeviceTable, push: Push) -> GroupGradients:
        """A push as gradients of a lookup, whose keys without a row are counted as dropped."""
        memory, ids = self.memory, self._ids_of(push.keys)
        layout = GroupLayout(table.arena, [(0, shape_of_keys(0, table, len(push.keys)))], False)
        descriptors = layout.describe([ids])
        buffers = LookupBuffers(memory, table.arena, layout.shape)
        buffers.load(layout, descriptors, 0)
        launches.find(buffers, grows=table.index.grows)
        absent = (buffers.rows[: len(push.keys)] == 0).sum()
        memory.own_counters(table)[fields.DROPPED.value] += absent
        launches.group_runs(buffers, uses=False)
        gradient = torch.from_numpy(np.ascontiguousarray(push.gradients, np.float32)).to(memory.device)
        lookup = GroupLookup(layout, push.version, descriptors, buffers, None)
        return GroupGradients(lookup, {0: gradient}, 1.0)

    @override
    def capture(
        self, tables: Sequence[str], parts: PerTable, since: PerTable | None = None, *, track: bool = False
    ) -> Capture:
        """Waits for a list of the rows, not for the rows. Changes are always tracked."""
        with memory_report(self.memory):
            return DeviceCapture(
                self.memory, {name: self.table(name).settled for name in tables}, parts, since
            )

    @override
    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """Waits for the device once."""
        chosen = {name: self.table(name).settled.number for name in tables}  # first: rows may have to go
        counters = self.memory.learn_now().reshape(-1, fields.COUNTERS.value)
        return {name: int(counters[number, fields.ROWS.value]) for name, number in chosen.items()}


def _check_offsets(title: str, offsets: Tensor, ids: int) -> None:
    numbers = offsets.numpy()
    if numbers[0] != 0:
        raise ValueError(f"{title} offsets must start at 0, got {numbers[0]}.")
    falls = np.nonzero(np.diff(numbers) < 0)[0]
    if len(falls):
        i = int(falls[0])
        raise ValueError(
            f"{title} offsets must not decrease, but offsets[{i}] = {numbers[i]} is followed by "
            f"{numbers[i + 1]}."
        )
    if numbers[-1] != ids:
        raise ValueError(f"{title} offsets must end at the number of ids, {ids}, got {numbers[-1]}.")
