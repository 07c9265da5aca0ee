"""`RemoteBatches`: lookups and gradients of batches whose rows are on parameter servers.

A lookup groups the batch by key, sorts the distinct keys by server (`Route`) and sends each server its share.
Gradients, summed by key, return the same way without their keys, because a server remembers the request.
Lookups run ahead of the computation and gradients return in the background, as far as the bound on staleness
allows (`StalenessWindow`). With a bound of 1 a lookup starts when the gradients of the previous batch have
been applied, and results are bit-identical to those of a store in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from karvan.distributed import Connection
from karvan.distributed.clients.parameter_servers import Servers
from karvan.distributed.clients.step_commits import StepCommits
from karvan.native import _native
from karvan.ragged import IdsReference
from karvan.store.exchange.wire_format import rule_to_json
from karvan.store.program import LookupInputs, LookupPlan, LookupProgram, Prepared
from karvan.store.remote.lookups_in_flight import LookupsInFlight
from karvan.store.remote.server_batches import ServerBatches
from karvan.store.remote.server_lookup import ServerLookup
from karvan.store.remote.staged_updates import StagedUpdates
from karvan.store.remote.staleness_window import Countdown
from karvan.store.remote.worker_batches import WorkerBatches
from karvan.store.remote.worker_lookup import Sent, WorkerLookup
from karvan.store.types import GradientFlags, Rule


class LocalGradients(GradientFlags):
    """Gradients that have not been sent yet. The flags are the same on all trainers that step together.

    made: sums by key, or, for a worker, gradients of outputs. complete: no feature lacks a gradient.
    """

    def __init__(
        self, made: _native.Gradients | Sent, finite: list[bool], touched: list[bool], complete: bool
    ) -> None:
        super().__init__(finite, touched)
        self.made = made
        self.complete = complete


class RemoteBatches:
    """The batches of one store; the methods are those of `Store`. dim: the floats of a table's vectors."""

    def __init__(
        self,
        connection: Connection,
        servers: Servers,
        store: int,
        lookups: LookupsInFlight,
        dim: Callable[[str], int],
    ) -> None:
        self._connection = connection
        self._servers = len(servers)
        self._store = store
        self._wire = connection.settings.wire
        self._lookups = lookups
        self._window = lookups.window
        self.at_servers = ServerBatches(servers, store, self._wire, lookups, dim)
        self.at_workers: WorkerBatches | None = None
        if connection.workers is not None:
            self.at_workers = WorkerBatches(connection.workers, servers, store, self._wire, lookups)
        self._elastic: StagedUpdates | None = None
        if isinstance(servers.commits, StepCommits):
            self._elastic = StagedUpdates(
                servers.commits, self.at_servers, self.at_workers, lookups, len(servers)
            )
        self._last_lookup = time.monotonic()  # the time of the last training lookup

    @property
    def _looks_ahead(self) -> bool:
        """Whether lookups start before their batch's turn, and so perhaps for batches that are never used."""
        return self._connection.settings.staleness > 1

    def prepare(
        self,
        program: LookupProgram,
        inputs: LookupInputs,
        *,
        training: bool | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> Prepared:
        """A lookup whose purpose is known starts as soon as staleness allows."""
        lookup = self._lookup(program, inputs, bool(training), step, now, ahead=True)
        if training is not None and self._looks_ahead:
            if training:
                lookup.offered = True
                self._window.offer(lookup)
            else:
                self._begin_evaluation(lookup)
        return lookup

    def forward(
        self,
        program: LookupProgram,
        inputs: LookupInputs | Prepared,
        *,
        training: bool,
        step: int,
        now: float,
    ) -> LookupPlan:
        """Look up and pool a batch."""
        self._window.check()
        self._lookups.send_withdrawn()
        lookup: ServerLookup | WorkerLookup
        if isinstance(inputs, ServerLookup | WorkerLookup):
            lookup = inputs
            if not lookup.fits(training, step, now):
                batch = inputs.plan if isinstance(inputs, ServerLookup) else inputs.reference
                lookup = self._lookup(program, batch, training, step, now)
        else:
            lookup = self._lookup(program, inputs, training, step, now)
        if training:
            self._window.need(lookup)
        elif not lookup.started:
            self._begin_evaluation(lookup)
        if training:
            self._watch(lookup)
            self._lookups.use(lookup.number)
        lookup.finish()
        if isinstance(lookup, ServerLookup):
            self.at_servers.note_answers(lookup)
        return LookupPlan(lookup.plan if isinstance(lookup, ServerLookup) else None, {}, lookup)

    def _begin_evaluation(self, lookup: ServerLookup | WorkerLookup) -> None:
        """Start a lookup that sees all gradients of this trainer."""
        if self.at_workers is not None:  # otherwise lookups and gradients share one ordered channel
            self._window.drain()
        lookup.begin(0)

    def _lookup(
        self,
        program: LookupProgram,
        inputs: LookupInputs | Prepared,
        training: bool,
        step: int,
        now: float,
        *,
        ahead: bool = False,
    ) -> ServerLookup | WorkerLookup:
        if isinstance(inputs, IdsReference):
            workers = 0 if self.at_workers is None else len(self.at_workers)
            if self.at_workers is None or inputs.worker >= workers:
                raise ValueError(f"Expected a reference to one of {workers} embedding workers, got {inputs}.")
            return self.at_workers.make(program, inputs, training=training, step=step, now=now)
        if isinstance(inputs, list):
            make = _native.prepare if ahead else _native.Plan
            inputs = make(program.native, inputs)
        assert isinstance(inputs, _native.Plan)
        return self.at_servers.make(program, inputs, training=training, step=step, now=now)

    def _watch(self, lookup: ServerLookup | WorkerLookup) -> None:
        """Report to the window whether a lookup that ran ahead was ready in time."""
        now = time.monotonic()
        step, self._last_lookup = now - self._last_lookup, now
        if lookup.offered:
            waited, ready = lookup.ready()
            self._window.used(waited, (now - ready) / step)

    def reduce(self, plan: LookupPlan, addresses: Sequence[int], strides: Sequence[int]) -> LocalGradients:
        """Trainers that wait for each other agree on what is finite."""
        lookup = _lookup_of(plan)
        assert isinstance(lookup, ServerLookup)
        mine = lookup.plan.reduce(list(addresses), list(strides))
        return self._agreed(mine, mine.finite(), mine.touched(), lookup.route.complete(mine))

    def hold(self, plan: LookupPlan, gradients: Sequence[Tensor | None]) -> LocalGradients:
        """A worker will sum them by key."""
        lookup = _lookup_of(plan)
        assert isinstance(lookup, WorkerLookup)
        return self._agreed(
            lookup.pack(gradients),
            lookup.finite(gradients),
            lookup.touched(gradients),
            all(each is not None for each in gradients),
        )

    def _agreed(
        self, made: _native.Gradients | Sent, finite: list[bool], touched: list[bool], complete: bool
    ) -> LocalGradients:
        together = self._connection.world_size > 1 and self._connection.joint_steps
        if together and self._elastic is None:  # all step, or none; in an elastic run a commit decides that
            flags = [*touched, *(not good for good in finite), not complete]
            agreed = (self._connection.here.sum(torch.tensor(flags, dtype=torch.float32)) > 0).tolist()
            slots = len(touched)
            touched, finite = agreed[:slots], [not bad for bad in agreed[slots:-1]]
            complete = not agreed[-1]
        return LocalGradients(made, finite, touched, complete)

    def update(
        self,
        program: LookupProgram,
        gradients: Sequence[tuple[LookupPlan, LocalGradients]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """Gradients are sent to the servers, or to workers, in the background.

        In an elastic run they are staged, and applied when the step is committed (`StagedUpdates`).
        """
        self._window.check()
        finite = [all(bits) for bits in zip(*(own.finite() for _, own in gradients), strict=True)]
        applied: dict[str, Any] = {}
        skipped = []
        for table, good in zip(program.tables, finite, strict=True):
            if table in rules and good:
                applied[table] = rule_to_json(rules[table])
            elif table in rules:
                skipped.append(table)
        lookups = [_lookup_of(plan) for plan, _ in gradients]
        numbers = [lookup.number for lookup in lookups]
        sequence = self._lookups.push(numbers)
        head = {
            "store": self._store,
            "sequence": sequence,
            "batches": numbers,
            "rules": applied,
            "steps": {table: steps[table] for table in applied},
            "skipped": skipped,
            "complete": all(own.complete for _, own in gradients),
            "wire": self._wire,
        }
        made = [own.made for _, own in gradients]
        if self._elastic is not None:
            self._elastic.stage(head, lookups, made)
        else:
            self._push(head, lookups, made)

    def _push(self, head: Mapping[str, Any], lookups: Sequence[Any], made: Sequence[Any]) -> None:
        """Send gradients to the servers, and to the workers that have the ids of some passes."""
        passes: dict[int | None, list[int]] = {}  # positions of the passes, by the worker that has the ids
        for position, lookup in enumerate(lookups):
            worker = lookup.reference.worker if isinstance(lookup, WorkerLookup) else None
            passes.setdefault(worker, []).append(position)
        calls = sum(self._servers if worker is None else 1 for worker in passes)
        pending = Countdown(calls, partial(self._applied, lookups), self._window.fail)
        self._window.sent(head["batches"])
        for worker, mine in passes.items():
            named = {**head, "mine": mine}
            chosen = [lookups[position] for position in mine]
            gradients = [made[position] for position in mine]
            if worker is None:
                self.at_servers.push(named, chosen, gradients, 1.0 / self._connection.divisor, pending)
            else:
                assert self.at_workers is not None
                self.at_workers.push(worker, named, chosen, gradients, pending)

    def _applied(self, lookups: Sequence[ServerLookup | WorkerLookup]) -> None:
        """The gradients of these lookups have been applied; the lookups are held until then."""
        self._window.end([lookup.number for lookup in lookups])


def _lookup_of(plan: LookupPlan) -> ServerLookup | WorkerLookup:
    assert isinstance(plan.remote, ServerLookup | WorkerLookup)
    return plan.remote
