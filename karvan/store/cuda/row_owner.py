"""`DeviceOwner`: lookups and updates of the rows that a rank owns, for all ranks.

The keys that the ranks ask for are a batch of the rank's own store: a feature for each rank and table, whose
keys, outputs and gradients are in the messages themselves. Keys that several ranks ask for are found or
inserted once, and their gradients are added up in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.batch_ids import FeatureIds, GroupLayout, LookupBuffers, shape_of_keys
from karvan.store.cuda.gradients import GroupGradients, GroupLookup, is_aligned
from karvan.store.cuda.kernels import fields, routing
from karvan.store.cuda.kernels.routing import average_runs
from karvan.store.cuda.kernels.runs import sum_pieces
from karvan.store.cuda.kernels.runs import write_sums as _write_sums
from karvan.store.cuda.store import CudaStore, DeviceGradients, DeviceInputs
from karvan.store.cuda.updates import put_scale
from karvan.store.messages import words
from karvan.store.program import LookupPlan, LookupProgram, RemoteLookup, program_of_ranks
from karvan.store.types import LookupContext

# `Sections`: the layout of messages, by the number of keys of each rank and table.
#
# A message of keys has for each rank its keys, table by table, and then their uses, of 4 bytes each. Vectors
# and gradients are in the same order. A vector takes whole units of 16 bytes, so that kernels can address all
# of them alike.


UNIT = 4  # floats

_PART = routing.PART_FIELDS.value


def units_of(dim: int) -> int:
    """The units of a vector."""
    return -(-dim // UNIT)


class Sections:
    """Where the keys, vectors and gradients of each rank and table are."""

    def __init__(self, counts: NDArray[np.int64], dims: Sequence[int]) -> None:
        self.counts = counts  # of keys, by rank and slot
        self.dims = list(dims)
        self.units = np.array([units_of(dim) for dim in dims], np.int64)
        self.keys = int(counts.sum())
        self.keys_of = [int(count) for count in counts.sum(1)]  # by rank
        self.words_of = [words(count) for count in self.keys_of]
        self.floats_of = [int(count) for count in (counts * self.units).sum(1) * UNIT]
        self.floats = sum(self.floats_of)

    def parts(self, front: int) -> NDArray[np.int64]:
        """What kernels read of each part; vectors begin after `front` units."""
        flat = self.counts.reshape(-1)
        number = np.cumsum(flat) - flat  # of its first key
        units = np.tile(self.units, len(self.counts))
        ends = flat * units
        word = np.repeat(np.cumsum(self.words_of) - self.words_of, len(self.dims))
        first_of_rank = np.repeat(np.cumsum(self.keys_of) - self.keys_of, len(self.dims))
        of_rank = np.repeat(np.array(self.keys_of, np.int64), len(self.dims))
        descriptors = np.empty((len(flat), _PART), np.int64)
        descriptors[:, routing.FIRST.value] = front + np.cumsum(ends) - ends - number * units
        descriptors[:, routing.UNITS.value] = units
        descriptors[:, routing.WORD.value] = word - first_of_rank
        descriptors[:, routing.USE.value] = 2 * (word + of_rank) - first_of_rank
        return descriptors

    def split_keys(self, message: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The keys and the uses of each part."""
        keys: list[Tensor] = []
        uses: list[Tensor] = []
        for piece, of_rank, total in zip(
            torch.split(message, self.words_of), self.counts.tolist(), self.keys_of, strict=True
        ):
            keys += torch.split(piece[:total], of_rank)
            uses += torch.split(piece[total:].view(torch.int32)[:total], of_rank)
        return keys, uses

    def split_values(self, values: Tensor) -> list[Tensor]:
        """The values of each part, of which there is one for each key."""
        return list(torch.split(values, self.counts.reshape(-1).tolist()))

    def split_vectors(self, floats: Tensor) -> list[Tensor]:
        """The vectors or gradients of each part, (keys, dim); their rows are whole units apart."""
        counts, units = self.counts.reshape(-1), np.tile(self.units, len(self.counts))
        pieces = torch.split(floats, (counts * units * UNIT).tolist())
        dims = self.dims * len(self.counts)
        return [
            piece.view(-1, UNIT * int(unit))[:, :dim]
            for piece, unit, dim in zip(pieces, units, dims, strict=True)
        ]


# The launches that sum the gradients of a request's outputs by key.


_HEAD = fields.HEAD.value


def write_sums(
    layout: GroupLayout,
    described: NDArray[np.int64],
    at: LookupBuffers,
    gradients: Mapping[int, Tensor],
    scale: float | Tensor,
) -> None:
    """Write the sums of the positions of each run, divided by `scale`, to where the arena has its row."""
    lookup = GroupLookup(layout, 0, described, at, None)
    descriptors = GroupGradients(lookup, gradients, scale).descriptors()
    head = np.zeros(_HEAD, np.int64)
    head[fields.PLAIN_END.value] = layout.plain_end
    put_scale(head, scale)
    memory, arena, columns = at.memory, at.arena, at.arena.layout.columns
    sent = memory.uploads.send(np.concatenate([head, descriptors.reshape(-1)]))
    partial = torch.empty(at.most_pieces, arena.layout.dim, dtype=torch.float32, device=memory.device)
    reads = (at.work, at.order, sent[_HEAD:], at.feature_of, at.out_rows, at.factors)
    shape = {**arena.constants("DIM", "COLUMNS"), "MAPPED": at.mapped, "ALIGNED": is_aligned(descriptors)}
    sum_pieces[(memory.programs,)](
        *reads, at.piece_starts, at.piece_ends, partial, sent, **shape, **launch.update_tile(columns)
    )
    runs = (at.starts, at.run_rows, at.run_pieces, at.long_runs, partial, arena.chunks, sent)
    constants = {**shape, **arena.constants("SHIFT", "STRIDE")}
    for long in (True, False):
        _write_sums[(memory.programs,)](
            *reads, *runs, LONG=long, **constants, **launch.update_tile(columns, long)
        )


def average(group: GroupGradients) -> None:
    """Divide the gradients of each key by the number of ranks that have sent one."""
    at = group.lookup.buffers
    if not group.lookup.layout.positions:
        return
    runs = (at.work, at.order, at.starts, at.run_rows)
    average_runs[(at.memory.programs,)](
        *(*runs, at.memory.uploads.send(group.descriptors()), at.feature_of),
        at.rows if group.present is None else group.present,
        PARTIAL=group.present is not None,
        **at.arena.constants("DIM", "COLUMNS"),
        **launch.tile(at.arena.layout.columns),
    )


class OwnerLookup(NamedTuple):
    """A lookup for all ranks, held until its gradients come."""

    program: LookupProgram
    plan: LookupPlan
    sections: Sections


class DeviceOwner:
    """Looks up and updates the rows of a store for ranks that ask."""

    def __init__(self, store: CudaStore) -> None:
        self._store = store

    def expect(self, tables: Sequence[str], asked: Sections, message: Tensor) -> DeviceInputs | None:
        """The keys of a training lookup to come, which a host tier brings the rows of as long as it is held.

        None: the store has no such tier.
        """
        if self._store.memory.budget is None:
            return None
        batch = self._inputs(tables, asked.split_keys(message)[0])
        self._store.expect(batch)
        return batch

    def lookup(
        self, tables: Sequence[str], asked: Sections, message: Tensor, context: LookupContext
    ) -> tuple[OwnerLookup, Tensor]:
        """Vectors for the keys of all ranks' messages, in the order of the keys."""
        program = program_of_ranks(tuple(tables), tuple(asked.dims), len(asked.counts))
        keys, uses = asked.split_keys(message)
        vectors = torch.empty(asked.floats, dtype=torch.float32, device=self._store.device)
        places = asked.split_vectors(vectors)
        outs = [place if place.is_contiguous() else torch.empty_like(place) for place in places]
        batch = self._inputs(tables, keys, dict(enumerate(uses)), dict(enumerate(outs)))
        plan = self._store.forward(program, batch, context)
        for place, out in zip(places, outs, strict=True):
            if place is not out:
                place.copy_(out)
        assert isinstance(plan.remote, RemoteLookup)
        plan.remote.take()  # the outputs are in `vectors`, which nobody needs once they are sent
        return OwnerLookup(program, plan, asked), vectors

    def _inputs(
        self,
        tables: Sequence[str],
        keys: Sequence[Tensor],
        uses: Mapping[int, Tensor] | None = None,
        outs: Mapping[int, Tensor] | None = None,
    ) -> DeviceInputs:
        slots = len(tables)
        shapes = []
        for part, values in enumerate(keys):
            table = self._store.memory.tables[tables[part % slots]]
            shapes.append(shape_of_keys(part % slots, table, values.numel()))
        return self._store.inputs_of(shapes, [FeatureIds(values) for values in keys], uses, outs)

    def hold(
        self, answer: OwnerLookup, floats: Tensor, present: Tensor | None, *, by_key: bool
    ) -> DeviceGradients:
        """The ranks' gradients; present: which of the keys have one, None for all.

        by_key: the mean over the ranks that have a key, instead of the sum.
        """
        plan = self._store.hold(answer.plan, answer.sections.split_vectors(floats))
        if present is not None:
            flags = dict(enumerate(answer.sections.split_values(present.int())))
            for group in plan.groups:
                group.present = group.lookup.layout.spread(flags, self._store.device)
        if by_key:
            for group in plan.groups:
                average(group)
        return plan
