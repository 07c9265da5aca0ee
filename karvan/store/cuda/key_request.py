"""`KeyRequest`: the distinct keys of a batch, sorted by owner, and the batch's positions that have them.

The features of tables of one dim make a group, whose positions are those of `GroupLayout`. Positions of all
groups are sorted by (owner, table, hash), which gives the distinct keys in the order of the messages. The
host waits for the device once, for the numbers of keys: sizes of messages depend on them.

A position's row is the number of its key's vector among the received ones (`kernels/routing.py`); row 0 is
zeros. So the kernels that copy and pool rows of tables, and sum gradients by row, do so here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda import lookup as launches
from karvan.store.cuda.arena import RowLayout, RowSpace
from karvan.store.cuda.batch_ids import FeatureShape, GroupLayout, LookupBuffers
from karvan.store.cuda.kernels import fields, routing
from karvan.store.cuda.launch import Uploads
from karvan.store.cuda.row_owner import Sections, units_of, write_sums
from karvan.store.cuda.store import DeviceInputs
from karvan.store.cuda.table_memory import TableMemory

# `ReceivedVectors`: vectors in one buffer, addressed like the rows of a table.


_UNIT_BYTES = 16
_SHIFT = 30  # a buffer has at most twice so many units: row numbers are 32-bit


class VectorLayout(RowLayout):
    """Vectors of float32 that begin at any unit."""

    __slots__ = ()

    @property
    def stride(self) -> int:
        """Bytes from one row number to the next."""
        return _UNIT_BYTES


class ReceivedVectors(RowSpace):
    """Vectors of one dim, by the number of the unit that they begin at."""

    def __init__(self, dim: int, device: torch.device) -> None:
        super().__init__(VectorLayout(0, dim, 0), 0, _SHIFT, torch.zeros(2, dtype=torch.int64, device=device))

    def place(self, buffer: Tensor, uploads: Uploads, before: int = 0) -> None:
        """The buffer that has them; before: how many numbers there are before its first unit."""
        if buffer.numel() * 4 + before * _UNIT_BYTES > 2 * _UNIT_BYTES << _SHIFT:
            raise ValueError(
                "A batch of a rank expects vectors of distinct keys of at most "
                f"{(2 * _UNIT_BYTES << _SHIFT) >> 30} GiB, got {buffer.numel() * 4 / 2**30:.1f}: use smaller "
                "batches."
            )
        first = buffer.data_ptr() - before * _UNIT_BYTES
        self.chunks = uploads.send(np.array([first, first + (_UNIT_BYTES << _SHIFT)], np.int64))


_BLOCK = fields.BLOCK.value


class RequestGroup(NamedTuple):
    """The features of a batch whose tables have one dim."""

    layout: GroupLayout
    vectors: ReceivedVectors
    buffers: LookupBuffers


class _SortedKeys(NamedTuple):
    """All positions, sorted by part and hash."""

    order: Tensor  # the positions
    hashes: Tensor
    parts: Tensor
    numbers: Tensor  # of the keys
    starts: Tensor  # the first position of each key, then the end of the last one
    end: Tensor  # the number of positions that are looked up


class KeyRequest:
    """A batch of a rank: what it asks owners for, and where their answers go."""

    plan = None

    def __init__(self, batch: DeviceInputs, slots: int, ranks: int, memory: TableMemory) -> None:
        self.batch = batch
        self.ranks = ranks
        dims = [0] * slots
        by_dim: dict[int, list[tuple[int, FeatureShape]]] = {}
        for number, feature in enumerate(batch.layout.shapes):
            dims[feature.slot] = feature.table.spec.dim
            by_dim.setdefault(dims[feature.slot], []).append((number, feature))
        self.front = max(map(units_of, dims))  # of the row of zeros
        self.groups = [self._group(dim, features, memory) for dim, features in by_dim.items()]
        positions = sum(group.layout.positions for group in self.groups)
        self.rows = torch.empty(positions, dtype=torch.int32, device=memory.device)
        counts = np.zeros(ranks * slots, np.int64)
        sorted_keys: _SortedKeys | None = None
        if positions:
            sorted_keys, numbers = self._sort(positions, slots, memory)
            host_numbers = numbers.cpu().numpy()  # waits for the device
            counts, faults = host_numbers[:-1], int(host_numbers[-1])
            if faults:
                raise ValueError(
                    "A batch has wrong offsets, found on the GPU: expected offsets that start at 0, do not "
                    "decrease, and end at the number of ids. Ragged.validate() says which are wrong."
                )
        self.sections = Sections(counts.reshape(ranks, slots), dims)
        self.message = torch.zeros(sum(self.sections.words_of), dtype=torch.int64, device=memory.device)
        self.key_rows = torch.empty(self.sections.keys, dtype=torch.int32, device=memory.device)
        self._grouped = False
        if sorted_keys is not None:
            self._number(sorted_keys, memory)

    def _group(
        self, dim: int, features: Sequence[tuple[int, FeatureShape]], memory: TableMemory
    ) -> RequestGroup:
        vectors = ReceivedVectors(dim, memory.device)
        layout = GroupLayout(vectors, features, training=False)
        return RequestGroup(layout, vectors, LookupBuffers(memory, vectors, layout.shape))

    def _sort(self, positions: int, slots: int, memory: TableMemory) -> tuple[_SortedKeys, Tensor]:
        """The sorted positions, and the number of distinct keys of each part, followed by that of faults."""
        device = memory.device
        hashes = torch.empty(positions, dtype=torch.int64, device=device)
        parts = torch.empty(positions, dtype=torch.int32, device=device)
        faults = torch.zeros(fields.ARENA_COUNTERS.value, dtype=torch.int64, device=device)
        at = 0
        for group in self.groups:
            if not group.layout.positions:
                continue
            layout, buffers = group.layout, group.buffers
            buffers.load(layout, layout.describe(self.batch.ids), 0)
            launches.describe(buffers, faults)
            features = (buffers.features, len(layout.features), buffers.head, buffers.out_rows)
            routing.route_keys[(layout.shape.positions,)](
                *(*features, buffers.feature_of, hashes[at:], parts[at:], self.ranks, slots),
                FEATURES=launch.power(len(layout.features)),
                MAPPED=buffers.mapped,
            )
            buffers.rows = self.rows[at : at + group.layout.positions]
            at += group.layout.positions
        last = self.ranks * slots
        hashes, by_hash = torch.sort(hashes)
        parts, by_part = torch.sort(parts[by_hash], stable=True)
        hashes, order = hashes[by_part], by_hash[by_part]
        begins = parts < last
        begins[1:] &= (hashes[1:] != hashes[:-1]) | (parts[1:] != parts[:-1])
        before = torch.zeros(positions + 1, dtype=torch.int32, device=device)
        torch.cumsum(begins, 0, dtype=torch.int32, out=before[1:])
        numbers = before[1:] - 1
        starts = torch.empty(positions + 1, dtype=torch.int32, device=device)
        places = torch.where(begins, numbers, positions).long()
        starts.scatter_(0, places, torch.arange(positions, dtype=torch.int32, device=device))
        ends = torch.searchsorted(parts, torch.arange(last + 1, dtype=torch.int32, device=device))
        counts = torch.empty(last + 1, dtype=torch.int64, device=device)
        counts[:-1] = before[ends].diff()
        counts[-1] = faults[fields.FAULTS.value]
        return _SortedKeys(order, hashes, parts, numbers, starts, ends[-1:]), counts

    def _number(self, sorted_keys: _SortedKeys, memory: TableMemory) -> None:
        """Write the message and the rows of positions."""
        count, positions = self.sections.keys, self.rows.numel()
        parts = self.sections.parts(self.front)
        of_parts = memory.uploads.send(parts)
        sorted_keys.starts[count : count + 1].copy_(sorted_keys.end)
        uses: Tensor | None = None
        if self.batch.uses is not None:
            given = self.batch.uses
            uses = torch.cat([group.layout.spread(given, memory.device) for group in self.groups])
        if count:
            routing.pack_keys[launch.blocks(count)](
                *(sorted_keys.starts, sorted_keys.order, sorted_keys.hashes, sorted_keys.parts, of_parts),
                *(self.rows if uses is None else uses, self.message, self.key_rows, count),
                GIVEN=uses is not None,
            )
        places = (sorted_keys.order, sorted_keys.parts, sorted_keys.numbers, of_parts, self.rows)
        routing.number_rows[launch.blocks(positions)](*places, positions, len(parts))

    def group_runs(self) -> None:
        """Sort the positions by row, which gradients need; once."""
        if not self._grouped:
            self._grouped = True
            for group in self.groups:
                if group.layout.positions:
                    group.buffers.work.zero_()
                    launches.group_runs(group.buffers, uses=False)

    def tensors(self) -> list[Tensor]:
        """All memory on the device."""
        result = [self.rows, self.message, self.key_rows]
        for group in self.groups:
            buffers = group.buffers
            result += [*buffers.shared, buffers.factors, buffers.order]
        for feature in self.batch.ids:
            result += [t for t in (feature.values, feature.offsets, feature.weights) if t is not None]
        return result

    def pool(self, received: Tensor, memory: TableMemory) -> dict[int, Tensor]:
        """The outputs of features, from vectors that begin after the row of zeros."""
        outs: dict[int, Tensor] = {}
        for group in self.groups:
            layout, buffers = group.layout, group.buffers
            buffers.memory = memory
            outputs = layout.outputs(memory.device)
            outs |= outputs
            if not group.layout.positions:
                for out in outputs.values():
                    out.zero_()
                continue
            group.vectors.place(received, memory.uploads)
            buffers.load(layout, layout.describe(self.batch.ids, outputs), 0)
            launches.fill_outputs(buffers)
        return outs

    def sum_gradients(
        self, gradients: Sequence[Tensor | None], scale: float | Tensor, memory: TableMemory
    ) -> Tensor:
        """Gradients of outputs, divided by `scale`, as sums by key in the order of the message."""
        self.group_runs()
        sums = torch.empty(self.sections.floats, dtype=torch.float32, device=memory.device)
        for group in self.groups:
            if group.layout.positions:
                group.buffers.memory = memory
                group.vectors.place(sums, memory.uploads, before=self.front)
                descriptors, mine = group.layout.describe(self.batch.ids), group.layout.of_features(gradients)
                write_sums(group.layout, descriptors, group.buffers, mine, scale)
        return sums

    def present(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Whether each key has a gradient, in the order of the message; uint8."""
        device = self.rows.device
        marks = torch.zeros(self.front + self.sections.floats // 4, dtype=torch.uint8, device=device)
        for group in self.groups:
            flags = [gradients[number] is not None for number in group.layout.numbers]
            if group.layout.positions:
                has = torch.tensor(flags, device=device)[group.buffers.feature_of.long()]
                marks[group.buffers.rows[has.repeat_interleave(_BLOCK)].long()] = 1
        return marks[self.key_rows.long()]
