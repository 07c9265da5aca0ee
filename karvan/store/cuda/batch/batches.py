"""Whole batches on a device: from ids to outputs, and from gradients to updated rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from karvan.store.cuda.batch import lookup as launches
from karvan.store.cuda.batch.batch_ids import FeatureIds, GroupIds
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.batch.gradients import GroupGradients, GroupLookup, update_group, without_moved
from karvan.store.cuda.batch.graphs import GraphPool
from karvan.store.cuda.batch.updates import check_state
from karvan.store.cuda.rows import policies
from karvan.store.cuda.rows.arena import RowArena, RowSpace
from karvan.store.cuda.rows.memory_errors import MemoryReport
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.program import FeatureTensors, LookupProgram
from karvan.store.remote.output_layout import OutputLayout
from karvan.store.types import GradientFlags, Rule


class DeviceInputs:
    """A batch whose ids are on the store's device.

    uses: how many of its key each id counts as, by the features' numbers; None: one. outs: memory for the
    outputs, likewise; None: they are allocated.
    """

    plan = None

    def __init__(
        self,
        ids: Sequence[FeatureIds],
        layouts: Sequence[OutputLayout],
        uses: Mapping[int, Tensor] | None = None,
        outs: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.ids = ids
        self.layouts = layouts
        self.uses = uses
        self.outs = outs


class DeviceLookup:
    """A batch after its lookup: a `GroupLookup` for each row layout."""

    plan = None

    def __init__(
        self, groups: Sequence[GroupLookup], layouts: Sequence[OutputLayout], versions: Mapping[str, int]
    ) -> None:
        self.groups = groups
        self.versions = versions  # of the tables
        self._layouts = layouts

    def take(self) -> list[tuple[Tensor, OutputLayout]]:
        """See `RemoteLookup.take`."""
        outs: dict[int, Tensor] = {}
        for group in self.groups:
            outs |= group.outs
            group.outs = {}
        return [(outs[number], layout) for number, layout in enumerate(self._layouts)]


class DeviceGradients(GradientFlags):
    """The gradients of a lookup's outputs. Whether they are finite is only known when they are applied."""

    def __init__(self, groups: Sequence[GroupGradients], slots: int) -> None:
        touched = [False] * slots
        for group in groups:
            for number, feature in group.lookup.ids.features:
                touched[feature.slot] |= number in group.gradients and feature.cells > 0
        super().__init__([True] * slots, touched)
        self.groups = groups

    def check_finite(self) -> list[bool]:
        """Whether the gradients of each table are finite; waits for the device."""
        found = list(self.finite())
        for group in self.groups:
            for number, feature in group.lookup.ids.features:
                gradient = group.gradients.get(number)
                if gradient is not None:
                    found[feature.slot] &= bool(torch.isfinite(gradient).all())
        return found


class DeviceBatches:
    """Lookups and updates of batches, for the tables of one device."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._graphs = GraphPool(memory)

    def prepare(self, program: LookupProgram, inputs: Sequence[FeatureTensors]) -> DeviceInputs:
        """Move ids to the device, and check what the host can see of them."""
        device, tables = self._memory.device, self._memory.tables
        slots = {name: slot for slot, name in enumerate(program.tables)}
        ids, layouts = [], []
        for spec, given in zip(program.features, inputs, strict=True):
            layout = given.layout
            if layout.offsets is None:
                if layout.ids != layout.samples:
                    raise ValueError(
                        f"{spec.title} expected one id for each of {layout.samples} samples, got "
                        f"{layout.ids} ids."
                    )
            elif layout.offsets.is_cpu:
                _check_offsets(spec.title, layout.offsets, layout.ids)
            offsets = None if layout.offsets is None else layout.offsets.to(device, non_blocking=True)
            ids.append(
                FeatureIds(
                    slots[spec.table],
                    tables[spec.table],
                    spec.mode,
                    spec.combiner,
                    spec.stack,
                    given.keys.to(device, non_blocking=True),
                    offsets,
                    None if given.weights is None else given.weights.to(device, non_blocking=True),
                    layout.ids,
                    layout.samples,
                    layout.length,
                )
            )
            layouts.append(layout._replace(offsets=offsets))
        return DeviceInputs(ids, layouts)

    def look_up(self, batch: DeviceInputs, *, training: bool, step: int, now: float) -> DeviceLookup:
        """Look up a batch and fill its outputs."""
        memory = self._memory
        memory.poll()
        by_arena: dict[RowArena, list[tuple[int, FeatureIds]]] = {}
        for number, feature in enumerate(batch.ids):
            by_arena.setdefault(feature.table.arena, []).append((number, feature))
        tables = {feature.table: None for feature in batch.ids}
        if training:
            for table in tables:
                table.next_version()
        with MemoryReport(memory):
            groups = [
                self._look_up_group(arena, features, batch, training, step)
                for arena, features in by_arena.items()
            ]
            if training:
                for table in tables:
                    policies.maintain(memory, table, step, now)
        versions = {feature.table.spec.name: feature.table.version for feature in batch.ids}
        return DeviceLookup(groups, batch.layouts, versions)

    def _look_up_group(
        self,
        arena: RowArena,
        features: Sequence[tuple[int, FeatureIds]],
        batch: DeviceInputs,
        training: bool,
        step: int,
    ) -> GroupLookup:
        memory, uses = self._memory, batch.uses
        ids = GroupIds(arena, features, training)
        wanted = ids.wanted()
        if training:
            memory.reserve(arena, wanted)
        if batch.outs is None:
            outs = ids.outputs(memory.device)
        else:
            outs = {number: batch.outs[number] for number, _ in features}
        descriptors = ids.describe(outs)
        steady = uses is None and all(t.admits_all and not t.index.grows for t in wanted)
        graphed = self._graphs.take(arena, ids.shape) if steady and ids.positions else None
        buffers = LookupBuffers(memory, arena, ids.shape) if graphed is None else graphed.buffers
        lookup = GroupLookup(ids, descriptors, buffers, graphed, outs)
        if not ids.positions:
            for out in outs.values():
                out.zero_()
            return lookup
        buffers.load(ids, descriptors, step)
        if training:
            memory.note_lookup(wanted)
        if graphed is not None:
            graphed.look_up()
        else:
            if uses is not None:
                buffers.uses = ids.spread(uses, memory.device)
            if training and not all(table.admits_all for table in wanted):
                buffers.missing = torch.empty(ids.positions, dtype=torch.int32, device=memory.device)
            launches.run(buffers, ids)
        if training and graphed is None:
            memory.counters.request_if_idle()
        return lookup

    def hold(self, lookup: DeviceLookup, gradients: Sequence[Tensor | None], scale: float) -> DeviceGradients:
        """The gradients of a lookup's outputs, which are `scale` times too large."""
        groups = []
        for group in lookup.groups:
            own = {n: g for n, _ in group.ids.features if (g := gradients[n]) is not None}
            groups.append(GroupGradients(group, own, scale))
        return DeviceGradients(groups, 1 + max(max(group.ids.versions) for group in lookup.groups))

    def update(
        self,
        tables: Sequence[str],
        gradients: Sequence[DeviceGradients],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """Apply the sum of gradients to those of the tables, which are in the order of slots, with a rule."""
        for name, rule in rules.items():
            check_state(self._memory.tables[name], rule)
        of_slots = {slot: rules[name] for slot, name in enumerate(tables) if name in rules}
        step_of = {slot: steps[name] for slot, name in enumerate(tables) if name in rules}
        by_arena: dict[RowSpace, list[GroupGradients]] = {}
        for held in gradients:
            for group in map(without_moved, held.groups):
                if group.gradients:
                    by_arena.setdefault(group.lookup.ids.arena, []).append(group)
        with MemoryReport(self._memory):
            for groups in by_arena.values():
                update_group(groups, len(tables), of_slots, step_of)
        for name in rules:
            self._memory.tables[name].next_version()


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


def as_gradients(held: Any) -> DeviceGradients:
    """Gradients that this store holds."""
    assert isinstance(held, DeviceGradients)
    return held
