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
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan import distributed
from karvan.distributed.connection import WIRES
from karvan.native import _native
from karvan.store import messages
from karvan.store.base import LocalTable, Store
from karvan.store.memory import MemoryStore
from karvan.store.messages import Routed, cut, features, floats, hashes_of, message_of, owners_of, words
from karvan.store.program import (
    LookupInputs,
    LookupPlan,
    LookupProgram,
    Passes,
    Prepared,
    empty,
    program_of_ranks,
)
from karvan.store.row_owner import Answered, Owner, Summed
from karvan.store.types import (
    Capture,
    Counts,
    Found,
    GradientFlags,
    Keys,
    LookupContext,
    PerTable,
    Push,
    Rules,
    TableSpec,
    Vectors,
)

# `RankShare`: what stores whose tables are spread over ranks have in common.
#
# Each rank holds the rows of its range of key hashes in a store of its own. Apart from batches, everything
# concerns this rank's share alone.


class RankShare(Store):
    """A rank's share of every table, in a store `local`."""

    def __init__(self, connection: distributed.Connection, local: Store) -> None:
        self._connection = connection
        self._ranks = connection.world_size
        self._wire = WIRES[connection.settings.wire]
        self._by_key = connection.settings.grad_reduce == "key"
        self._averages = connection.settings.grad_reduce == "mean"  # over all ranks
        self._local = local
        self.crossing_keys = 0  # distinct keys of batches that were requested from other ranks, so far
        self.bytes_sent = 0  # to other ranks, so far

    @property
    @override
    def share(self) -> tuple[int, int]:
        return self._connection.rank, self._ranks

    @override
    def apply(self, pushes: Mapping[str, Sequence[Push]], rules: Rules, steps: PerTable) -> None:
        """A collective. Versions are those of the owner's own table."""
        by_table: dict[str, list[Push]] = {}
        for table, listed in pushes.items():
            by_table[table] = []
            for push in listed:
                keys, values = self._to_owners(push.keys, push.gradients)
                by_table[table].append(Push(keys, values, push.version))
        self._local.apply(by_table, rules, steps)

    def _send(self, floats: Tensor, to: list[int], of: list[int]) -> Tensor:
        channel = self._connection.here
        before = channel.bytes_sent
        received = channel.exchange(floats.to(self._wire), to, of).float()
        self.bytes_sent += channel.bytes_sent - before
        return received

    def _to_owners(self, keys: Keys, values: Vectors) -> tuple[Keys, Vectors]:
        """Send keys and gradients to their owners; returns those received, in the order of ranks."""
        channel = self._connection.here
        owners = owners_of(hashes_of(keys), self._ranks)
        order = np.argsort(owners, kind="stable")
        counts = torch.from_numpy(np.bincount(owners, minlength=self._ranks).astype(np.int64)).view(-1, 1)
        to, of, dim = counts[:, 0].tolist(), channel.swap(counts)[:, 0].tolist(), values.shape[1]
        theirs = channel.exchange(torch.from_numpy(keys[order]), to, of)
        scaled = torch.from_numpy(values[order] * np.float32(self._scale())).reshape(-1)
        floats = self._send(scaled, [n * dim for n in to], [n * dim for n in of])
        return theirs.numpy(), floats.numpy().reshape(-1, dim)

    def _scale(self) -> float:
        return 1.0 / self._ranks if self._averages else 1.0

    @override
    def add_table(self, spec: TableSpec) -> None:
        """Each rank holds its part of the rows that a policy allows."""
        self._local.add_table(spec.share(*self.share))
        # Without a reference to this store: a cycle would keep its rows until the next garbage collection.
        self.table(spec.name).owns = partial(_owned_by, *self.share)

    @override
    def table(self, name: str) -> LocalTable:
        table = self._local.table(name)
        assert isinstance(table, LocalTable)
        return table

    @override
    def capture(
        self, tables: Sequence[str], parts: PerTable, since: PerTable | None = None, *, track: bool = False
    ) -> Capture:
        """Of this rank's share."""
        return self._local.capture(tables, parts, since, track=track)


def _owned_by(rank: int, ranks: int, keys: Keys) -> NDArray[np.bool_]:
    mine: NDArray[np.bool_] = owners_of(hashes_of(keys), ranks) == rank
    return mine


@dataclass(eq=False)
class OwnerGradients(GradientFlags):
    """Gradients that the owners of their rows have received. The flags are the same on all ranks."""

    owned: Summed


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
        sent = empty(sum(requested))
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
        self, program: LookupProgram, gradients: Passes[OwnerGradients], rules: Rules, steps: PerTable
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
        dims = [self._memory.table(table).spec.dim for table in keys]
        counts = [len(unique) for unique, _ in keys.values()]
        message = message_of(*(np.concatenate(parts) for parts in zip(*keys.values(), strict=True)))
        vectors = np.empty(sum(floats([counts], dims)), np.float32)
        inputs = features([counts], [message], dims, vectors.ctypes.data)
        self.forward(program_of_ranks(tuple(keys), tuple(dims), 1), inputs, context)
        ends = np.cumsum(np.multiply(counts, dims))
        return {
            table: Found(part.reshape(-1, dim), self.table(table).version)
            for table, dim, part in zip(keys, dims, np.split(vectors, ends[:-1]), strict=True)
        }

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
