"""`ShardedStore`: every rank owns a range of the key hashes of every table.

A lookup: the rank groups its batch by key (`LookupPlan`) and sorts the distinct keys by owner (`Route`).
There is one exchange of numbers of keys and one of keys, for all tables together. An owner groups the keys of
all ranks again, finds or inserts each key once, and sends vectors back in the order of the keys, in one
exchange. Gradients, summed by key, take one exchange more. The owner adds them up in the order of ranks, so
that results are the same from run to run.

`lookup`, `apply`, `prepare`, `forward` and `reduce` are collectives: all ranks call them, in the same order
on each channel. Everything else concerns this rank's share alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from karvan import distributed, native
from karvan.native import _native
from karvan.store import messages
from karvan.store.memory import MemoryStore
from karvan.store.messages import Routed, cut, floats, words
from karvan.store.program import LookupInputs, LookupPlan, LookupProgram, Prepared
from karvan.store.rank_share import RankShare
from karvan.store.row_owner import Answered, Owner, Summed
from karvan.store.types import (
    Counts,
    FeatureSpec,
    Found,
    GradientFlags,
    Keys,
    LookupContext,
    Rule,
)


class OwnerGradients(GradientFlags):
    """Gradients that the owners of their rows have received. The flags are the same on all ranks."""

    def __init__(self, finite: list[bool], touched: list[bool], owned: Summed) -> None:
        super().__init__(finite, touched)
        self.owned = owned


class RankLookup(NamedTuple):
    """A batch after its lookup."""

    routed: Routed
    owner: Answered  # what this rank has looked up for all

    @property
    def plan(self) -> _native.Plan:
        """The native plan of the rows that this rank owns."""
        return self.routed.plan


class ShardedStore(RankShare):
    """Tables that are spread over the ranks of a connection."""

    def __init__(self, connection: distributed.Connection) -> None:
        self._memory = MemoryStore(capacity=connection.settings.capacity)
        super().__init__(connection, self._memory)
        self._owner = Owner(self._memory)

    @override
    def prepare(
        self, program: LookupProgram, inputs: LookupInputs, context: LookupContext | None = None
    ) -> Prepared:
        """Keys are sent to their owners now, so all ranks prepare a batch, or none."""
        assert isinstance(inputs, list)
        return self._routed(_native.prepare(program.native, inputs), len(program.tables), alone=True)

    @override
    def forward(
        self, program: LookupProgram, inputs: LookupInputs | Prepared, context: LookupContext
    ) -> LookupPlan:
        if isinstance(inputs, Routed):
            routed = inputs
        else:
            assert isinstance(inputs, list)
            plan = _native.Plan(program.native, inputs)
            routed = self._routed(plan, len(program.tables), alone=False)
        owner = self._owner.lookup(program.tables, routed.asked, routed.received, context)
        answers = self._send(
            owner.vectors, floats(routed.asked, owner.dims), floats(routed.requested, owner.dims)
        )
        routed.route.pool(answers.data_ptr())
        return LookupPlan(routed.plan, {}, RankLookup(routed, owner))

    @override
    def reduce(self, plan: LookupPlan, addresses: Sequence[int], strides: Sequence[int]) -> OwnerGradients:
        """In front of its gradients a rank sends flags to every other: which tables have any gradients, which
        have some that are not finite, and whether keys are missing, because a feature had no gradient.
        """
        routed, owner = _lookup_of(plan)
        assert plan.native is not None
        mine = plan.native.reduce(list(addresses), list(strides))
        complete = routed.route.complete(mine)
        flags = [*mine.touched(), *(not good for good in mine.finite()), not complete]
        head, slots = len(flags), len(owner.tables)
        requested, asked = floats(routed.requested, owner.dims), floats(routed.asked, owner.dims)
        sent = native.empty(sum(requested))
        if complete:
            routed.route.pack_gradients(mine, self._scale(), sent.data_ptr())
        else:
            messages.pack(routed.sent, routed.requested, owner.dims, mine, self._scale(), sent)
        flag_floats = torch.tensor(flags, dtype=torch.float32)
        message = torch.cat([piece for part in torch.split(sent, requested) for piece in (flag_floats, part)])
        received = self._send(message, [head + n for n in requested], [head + n for n in asked])
        pieces = torch.split(received, [head + n for n in asked])
        agreed = torch.stack([piece[:head] > 0 for piece in pieces]).any(0).tolist()
        owned = self._owner.reduce(
            owner, [piece[head:].numpy() for piece in pieces], complete=not agreed[-1], by_key=self._by_key
        )
        return OwnerGradients([not bad for bad in agreed[slots:-1]], agreed[:slots], owned)

    @override
    def update(
        self,
        program: LookupProgram,
        gradients: Sequence[tuple[LookupPlan, OwnerGradients]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """The owners have the gradients already."""
        finite = [all(bits) for bits in zip(*(sums.finite() for _, sums in gradients), strict=True)]
        applied = {}
        for table, good in zip(program.tables, finite, strict=True):
            if table in rules and good:
                applied[table] = rules[table]
            elif table in rules:
                self.table(table).skip()
        passes = [(_lookup_of(plan).owner, sums.owned) for plan, sums in gradients]
        self._owner.update(program.tables, passes, applied, steps)

    @override
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        """A collective."""
        dims = {table: self._memory.table(table).spec.dim for table in keys}
        program = LookupProgram(
            [FeatureSpec(table, table, dim=dim, mode="cells") for table, dim in dims.items()]
        )
        outs = {table: np.empty((len(k), dims[table]), np.float32) for table, (k, _) in keys.items()}
        arrays = {table: (np.ascontiguousarray(k), np.ascontiguousarray(c)) for table, (k, c) in keys.items()}
        inputs = [
            _native.FeatureArrays(
                values=k.ctypes.data,
                cells=len(k),
                samples=len(k),
                out=outs[table].ctypes.data,
                uses=c.ctypes.data,
            )
            for table, (k, c) in arrays.items()
        ]
        self.forward(program, inputs, context)
        return {table: Found(out, self.table(table).version) for table, out in outs.items()}

    def _routed(self, plan: _native.Plan, slots: int, alone: bool) -> Routed:
        channel = self._connection.here
        route = _native.Route(plan, self._ranks, alone)
        counts = torch.tensor(route.counts, dtype=torch.int64).view(self._ranks, slots)
        before = channel.bytes_sent
        received = channel.swap(counts)
        to = [words(n) for n in counts.sum(1).tolist()]
        of = [words(n) for n in received.sum(1).tolist()]
        self.crossing_keys += route.keys - int(counts[self._connection.rank].sum())
        message = torch.empty(sum(to), dtype=torch.int64)
        route.pack_keys(message.data_ptr())
        asked = channel.exchange(message, to, of)
        self.bytes_sent += channel.bytes_sent - before
        return Routed(plan, route, counts.tolist(), received.tolist(), cut(message, to), cut(asked, of))


def _lookup_of(plan: LookupPlan) -> RankLookup:
    assert isinstance(plan.remote, RankLookup)
    return plan.remote
