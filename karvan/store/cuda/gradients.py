"""Gradients of lookups, and the updates of rows by the sum of those of one or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import lookup as launches
from karvan.store.cuda.arena import RowArena
from karvan.store.cuda.batch_ids import GroupLayout, LookupBuffers
from karvan.store.cuda.graphs import GraphedBuffers
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.runs import drop_positions, map_plain
from karvan.store.cuda.table_memory import DeviceTable, TableMemory
from karvan.store.cuda.updates import SlotRules, UpdateBuffers

_BLOCK = fields.BLOCK.value
_GRADIENT = fields.GRADIENT.value


@dataclass(eq=False)
class GroupLookup:
    """A group of features after its lookup; version: of the group's tables at that moment."""

    layout: GroupLayout
    version: int
    descriptors: NDArray[np.int64]
    buffers: LookupBuffers
    graphed: GraphedBuffers | None

    def __del__(self) -> None:
        if self.graphed is not None:
            self.graphed.free = True

    @property
    def has_erasures(self) -> bool:
        """Whether a table has lost rows since."""
        return any(table.erasures.newest > self.version for table in self.layout.tables)

    @property
    def has_moved(self) -> bool:
        """Whether a table's rows have got other numbers since."""
        return any(table.arena is not self.layout.arena for table in self.layout.tables)


@dataclass(eq=False)
class GroupGradients:
    """A lookup of one group, and the gradients of its outputs."""

    lookup: GroupLookup
    gradients: Mapping[int, Tensor]  # by the features' numbers in the program
    scale: float | Tensor  # the gradients are this many times too large; a float on the device, or here
    unless: Tensor | None = None  # a float on the device: unless it is 0, nothing is updated
    present: Tensor | None = None  # of each position, 0 where it has no gradient; None: all have one

    @property
    def complete(self) -> bool:
        """Whether every position has a gradient."""
        return self.present is None and len(self.gradients) == len(self.lookup.layout.features)

    def descriptors(self) -> NDArray[np.int64]:
        """The descriptors of the features, with their gradients."""
        descriptors = self.lookup.descriptors.copy()
        gradients = [self.gradients.get(number) for number in self.lookup.layout.numbers]
        descriptors[:, _GRADIENT] = [0 if g is None else g.data_ptr() for g in gradients]
        descriptors[:, _GRADIENT + 1] = [0 if g is None else g.stride(0) for g in gradients]
        return descriptors


def without_moved(gradients: GroupGradients) -> GroupGradients:
    """Drop and count gradients of tables whose rows have got other numbers since the lookup."""
    if not gradients.lookup.has_moved:
        return gradients
    layout, rows = gradients.lookup.layout, gradients.lookup.buffers.rows
    remaining = {
        number: gradients.gradients[number]
        for number, f in layout.features
        if f.table.arena is layout.arena and number in gradients.gradients
    }
    moved: dict[DeviceTable, list[Tensor]] = {}
    for (number, f), base in zip(layout.features, layout.bases, strict=True):
        if number in gradients.gradients and number not in remaining:
            moved.setdefault(f.table, []).append(rows[base : base + f.positions])
    _count_dropped(gradients.lookup.buffers.memory, moved)
    return replace(gradients, gradients=remaining)


def _count_dropped(memory: TableMemory, rows: Mapping[DeviceTable, Sequence[Tensor]]) -> None:
    """Count the distinct rows of each table, of which 0 is none, as dropped."""
    for table, parts in rows.items():
        ordered = torch.cat([torch.zeros_like(parts[0][:1]), *parts]).sort().values
        memory.own_counters(table)[fields.DROPPED.value] += (ordered[1:] != ordered[:-1]).sum()


def is_aligned(descriptors: NDArray[np.int64]) -> bool:
    """Whether all rows of gradients start at multiples of 16 bytes."""
    address, stride = np.bitwise_or.reduce(descriptors[:, _GRADIENT : _GRADIENT + 2])
    return bool(address % 16 == 0 and stride % 4 == 0)


def update_group(passes: Sequence[GroupGradients], rules: SlotRules) -> None:
    """Apply the sum of the passes' gradients to the tables, by their slots, that have a rule."""
    if len(passes) == 1 and passes[0].complete:
        _update_one(passes[0], rules)
        return
    used = sorted({slot for group in passes for slot in group.lookup.layout.slots})
    chosen = rules.of_slots(used)
    if not chosen.kinds:
        return
    joined = _join(passes, rules)
    if joined is None:
        return
    buffers, descriptors = joined
    sums = UpdateBuffers(buffers, rules.slots, len(descriptors), mapped=True)
    sums.load(0, 0, chosen, descriptors, 1.0, passes[0].unless)
    _note_late_changes(passes, sums, rules.slots)
    _save_rows(buffers)
    sums.run(chosen, is_aligned(descriptors))


def _update_one(gradients: GroupGradients, rules: SlotRules) -> None:
    lookup = gradients.lookup
    layout, buffers, graphed = lookup.layout, lookup.buffers, lookup.graphed
    if not layout.positions:
        return
    if graphed is not None and not graphed.valid:  # for example, a table was added since the lookup
        graphed = None
    chosen = rules.of_slots(layout.slots)
    if not chosen.kinds:
        return
    descriptors = gradients.descriptors()
    aligned = is_aligned(descriptors)
    if graphed is None:
        sums = UpdateBuffers(buffers, rules.slots, len(descriptors), mapped=buffers.mapped)
    else:
        sums = graphed.update_buffers(rules.slots, len(descriptors))
    sums.load(layout.plain_end, lookup.version, chosen, descriptors, gradients.scale, gradients.unless)
    _save_rows(buffers)
    if graphed is not None:  # which brings the descriptors to the device
        graphed.update(sums, chosen, aligned, drops=lookup.has_erasures)
    else:
        if lookup.has_erasures:
            sums.drop_runs()
        sums.run(chosen, aligned)
    _note_late_changes([gradients], sums, rules.slots)


def _save_rows(buffers: LookupBuffers) -> None:
    """Rows of the lookup that a capture has still to read are saved before they change."""
    arena = buffers.arena
    assert isinstance(arena, RowArena)
    for watcher in arena.watchers:
        watcher.save(buffers.run_rows, buffers.run_rows.numel() - 1, buffers.work)


def _note_late_changes(passes: Sequence[GroupGradients], sums: UpdateBuffers, slots: int) -> None:
    """Lookups note changes; if a capture was made since, their update is a change after it."""
    arena = passes[0].lookup.layout.arena
    assert isinstance(arena, RowArena)
    if arena.captured_version < min(group.lookup.version for group in passes):
        return
    now = np.zeros(slots, np.int64)
    for group in passes:
        for _, feature in group.lookup.layout.features:
            now[feature.slot] = feature.table.version + 1
    sums.note_changes(now)


def _join(
    passes: Sequence[GroupGradients], rules: SlotRules
) -> tuple[LookupBuffers, NDArray[np.int64]] | None:
    """One lookup whose positions are those of all passes that have a gradient, in the order of passes."""
    rows, feature_of, out_rows, factors, descriptors = [], [], [], [], []
    features = base = 0
    memory: TableMemory | None = None
    for group in passes:
        layout, buffers = group.lookup.layout, group.lookup.buffers
        if not layout.positions:
            continue
        memory, arena = buffers.memory, layout.arena
        group_descriptors = group.descriptors()
        own_rows, own_features = buffers.rows.clone(), buffers.feature_of
        for at, (_, f) in enumerate(layout.features):
            if group_descriptors[at, _GRADIENT] == 0:
                own_rows[layout.bases[at] : layout.bases[at] + f.positions] = 0
        if group.present is not None:
            own_rows *= group.present
        if group.lookup.has_erasures:
            sums = UpdateBuffers(buffers, rules.slots, len(group_descriptors), mapped=buffers.mapped)
            sums.load(layout.plain_end, group.lookup.version, rules, group_descriptors, 1.0)
            before = own_rows.clone()
            reads = (sums.features, own_features, sums.versions, arena.chunks)
            drop_positions[(layout.positions // _BLOCK,)](
                own_rows, layout.positions, *reads, **arena.constants("SHIFT", "STRIDE")
            )
            deleted = torch.where(own_rows == 0, before, 0)
            dropped: dict[DeviceTable, list[Tensor]] = {}
            for (_, f), start in zip(layout.features, layout.bases, strict=True):
                if rules.given[f.slot] is not None:
                    dropped.setdefault(f.table, []).append(deleted[start : start + f.positions])
            _count_dropped(memory, dropped)
        mapped = buffers.out_rows.clone() if buffers.mapped else torch.empty_like(own_rows)
        own_factors = (
            buffers.factors.clone() if buffers.mapped else torch.empty_like(own_rows, dtype=torch.float32)
        )
        if layout.plain_end:
            sent = memory.uploads.send(group_descriptors)
            map_plain[(layout.plain_end // _BLOCK,)](sent, own_features, mapped, own_factors)
        group_descriptors[:, fields.BASE.value] += base
        rows.append(own_rows)
        feature_of.append(own_features + features)
        out_rows.append(mapped)
        unscaled = isinstance(group.scale, float) and group.scale == 1.0  # to compare a tensor would wait
        factors.append(own_factors if unscaled else own_factors / group.scale)
        descriptors.append(group_descriptors)
        features += len(group_descriptors)
        base += layout.positions
    if memory is None:
        return None
    shape = passes[0].lookup.layout.shape._replace(
        training=False, plain_features=0, features=features, positions=base // _BLOCK, plain=0
    )
    joined = LookupBuffers(memory, passes[0].lookup.layout.arena, shape)
    joined.rows, joined.feature_of = torch.cat(rows), torch.cat(feature_of)
    joined.out_rows, joined.factors = torch.cat(out_rows), torch.cat(factors)
    joined.work.zero_()
    all_descriptors = np.concatenate(descriptors)
    memory.uploads.send_to(joined.features, all_descriptors)
    launches.group_runs(joined, uses=False)
    return joined, all_descriptors
