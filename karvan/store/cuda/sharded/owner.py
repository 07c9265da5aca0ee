"""`DeviceOwner`: lookups and updates of the rows that a rank owns, for all ranks.

The keys that the ranks ask for are a batch of the rank's own store: a feature for each rank and table, whose
keys, outputs and gradients are in the messages themselves. Keys that several ranks ask for are found or
inserted once, and their gradients are added up in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from karvan.store.cuda.batch.batch_ids import FeatureIds, shape_of_keys
from karvan.store.cuda.batch.batches import DeviceGradients, DeviceInputs
from karvan.store.cuda.sharded.gradient_sums import average
from karvan.store.cuda.sharded.sections import Sections
from karvan.store.cuda.store import CudaStore
from karvan.store.program import LookupPlan, LookupProgram, RemoteLookup
from karvan.store.types import FeatureSpec, LookupContext, Rule


class Answer(NamedTuple):
    """A lookup for all ranks, held until its gradients come."""

    program: LookupProgram
    plan: LookupPlan
    sections: Sections


class DeviceOwner:
    """Looks up and updates the rows of a store for ranks that ask."""

    def __init__(self, store: CudaStore) -> None:
        self._store = store
        self._programs: dict[tuple[str, ...], LookupProgram] = {}

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
    ) -> tuple[Answer, Tensor]:
        """Vectors for the keys of all ranks' messages, in the order of the keys."""
        program = self._program(tables, asked)
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
        return Answer(program, plan, asked), vectors

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
        self, answer: Answer, floats: Tensor, present: Tensor | None, *, by_key: bool
    ) -> DeviceGradients:
        """The ranks' gradients; present: which of the keys have one, None for all.

        by_key: the mean over the ranks that have a key, instead of the sum.
        """
        held = self._store.hold(answer.plan, answer.sections.split_vectors(floats))
        if present is not None:
            flags = dict(enumerate(answer.sections.split_values(present.int())))
            for group in held.groups:
                group.present = group.lookup.layout.spread(flags, self._store.device)
        if by_key:
            for group in held.groups:
                average(group)
        return held

    def update(
        self,
        passes: Sequence[tuple[Answer, DeviceGradients]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """Apply the sum of some backward passes to the tables that have a rule."""
        program = passes[0][0].program
        self._store.update(program, [(answer.plan, held) for answer, held in passes], rules, steps)

    def _program(self, tables: Sequence[str], asked: Sections) -> LookupProgram:
        name = tuple(tables)
        if name not in self._programs:
            self._programs[name] = LookupProgram(
                [
                    FeatureSpec(f"{table} for rank {rank}", table, dim=dim, mode="cells")
                    for rank in range(len(asked.counts))
                    for table, dim in zip(tables, asked.dims, strict=True)
                ]
            )
        return self._programs[name]
