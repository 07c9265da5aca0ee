"""`RemoteStore`: rows on parameter servers, each of which owns a range of the key hashes.

A lookup groups the batch by key, sorts the distinct keys by server (`Route`) and sends each server its share;
gradients, summed by key, return the same way without their keys, because a server remembers what it was
asked. Lookups run ahead of the computation and gradients return in the background, as far as the bound on
staleness allows (`Window`); with a bound of 1 a lookup begins when the gradients of the batch before have
been applied, and results are those of a store in memory, bit for bit.

Where embedding workers keep the ids of a batch, they do the lookup in the trainer's name, and sum its
gradients by key (`WorkerLookup`). Numbers of batches and pushes are the trainer's, so a worker that replaces
another can ask for the same once more: servers do each once.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from karvan import _native, distributed
from karvan.ragged import IdsReference
from karvan.store.base import Agreed, LookupPlan, LookupProgram, Prepared, Rule
from karvan.store.exchange.wire_format import rule_to_json, to_wire
from karvan.store.remote.server_lookup import ServerLookup
from karvan.store.remote.staleness_window import Countdown, taken
from karvan.store.remote.tables import RemoteTables
from karvan.store.remote.worker_lookup import Sent, WorkerLookup, watch
from karvan.wire import Message, Reply

_USED = 2048  # lookups without a push that a capture names; more than a step has passes


class Own(Agreed):
    """Gradients that are still here. What they say holds for all trainers that wait for each other.

    made: sums by key, or, for a worker, gradients of outputs. complete: no feature lacks one.
    """

    def __init__(
        self, made: _native.Gradients | Sent, finite: list[bool], touched: list[bool], complete: bool
    ) -> None:
        super().__init__(finite, touched)
        self.made = made
        self.complete = complete


class RemoteStore(RemoteTables):
    """Tables that are spread over parameter servers."""

    def __init__(self, connection: distributed.Connection) -> None:
        super().__init__(connection)
        self._workers = connection.workers
        self.wire = connection.settings.wire
        self._done: deque[int] = deque()  # lookups whose plans servers need not keep
        self._looked_up = time.monotonic()  # when the last training lookup was
        self._done_at: dict[int, deque[int]] = defaultdict(deque)  # … that workers made
        self._gone_at: dict[int, deque[str]] = defaultdict(deque)  # names of ids that workers need not keep
        self._watched: weakref.WeakSet[IdsReference] = weakref.WeakSet()
        self.keys_asked = 0  # distinct keys of batches so far
        # Seconds from a call to its answer, of the last ones.
        self.seconds: dict[str, deque[float]] = {"pull": deque(maxlen=4096), "push": deque(maxlen=4096)}

    @property
    def looks_ahead(self) -> bool:
        """Whether lookups begin before their batch's turn, and so perhaps for batches that never have one."""
        return self._connection.settings.staleness > 1

    @property
    def takes_references(self) -> bool:
        """See `Store.takes_references`."""
        return self._workers is not None

    def prepare(
        self,
        program: LookupProgram,
        inputs: list[int] | IdsReference,
        *,
        training: bool | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> Prepared:
        """See `Store.prepare`: a lookup whose purpose is known begins as soon as staleness allows."""
        lookup = self._lookup(program, inputs, bool(training), step, now, ahead=True)
        if training is not None and self.looks_ahead:
            if training:
                lookup.offered = True
                self.window.offer(lookup)
            else:
                self._begin_evaluation(lookup)
        return lookup

    def forward(
        self,
        program: LookupProgram,
        inputs: list[int] | IdsReference | Prepared,
        *,
        training: bool,
        step: int,
        now: float,
    ) -> LookupPlan:
        """See `Store.forward`."""
        self.window.check()
        self._send_withdrawn()
        lookup: ServerLookup | WorkerLookup
        if isinstance(inputs, ServerLookup | WorkerLookup):
            lookup = inputs
            if not lookup.fits(training, step, now):
                again = inputs.plan if isinstance(inputs, ServerLookup) else inputs.reference
                lookup = self._lookup(program, again, training, step, now)
        else:
            lookup = self._lookup(program, inputs, training, step, now)
        if training:
            self.window.need(lookup)
        elif not lookup.begun:
            self._begin_evaluation(lookup)
        if training:
            self._watch(lookup)
            self._note_use(lookup.number)
        lookup.finish()
        if isinstance(lookup, ServerLookup):
            self.seconds["pull"] += [reply.seconds for reply in lookup.replies]
        return LookupPlan(lookup.plan if isinstance(lookup, ServerLookup) else None, {}, lookup)

    def _note_use(self, number: int) -> None:
        """A forward uses a lookup: it counts in captures, whether it gets a push or not."""
        self._used.add(number)
        self._ahead.discard(number)
        if (
            len(self._used) > 2 * _USED
        ):  # of engines that get no gradients; servers have heard that these are done
            self._used.difference_update(sorted(self._used)[:_USED])

    def _begin_evaluation(self, lookup: ServerLookup | WorkerLookup) -> None:
        """Begin a lookup that sees all gradients of this trainer."""
        if self._workers is not None:  # otherwise they are in one line
            self.window.drain()
        lookup.begin(0)

    def _lookup(
        self,
        program: LookupProgram,
        inputs: list[int] | IdsReference | _native.Plan,
        training: bool,
        step: int,
        now: float,
        *,
        ahead: bool = False,
    ) -> ServerLookup | WorkerLookup:
        if isinstance(inputs, IdsReference):
            workers = len(self._workers or ())
            if inputs.worker >= workers:
                raise ValueError(f"Expected a reference to one of {workers} embedding workers, got {inputs}.")
            if inputs not in self._watched:
                self._watched.add(inputs)
                watch(inputs, self._forget_ids)
            return WorkerLookup(self, program, inputs, training=training, step=step, now=now)
        if isinstance(inputs, list):
            make = _native.prepare if ahead else _native.Plan
            inputs = make(program.native, inputs)
        return ServerLookup(self, program, inputs, training=training, step=step, now=now)

    def _watch(self, lookup: ServerLookup | WorkerLookup) -> None:
        """Tell the window whether a lookup that ran ahead was there in time."""
        now = time.monotonic()
        step, self._looked_up = now - self._looked_up, now
        if lookup.offered:
            waited, ready = lookup.ready()
            self.window.used(waited, (now - ready) / step)

    def send_pull(self, pull: ServerLookup) -> list[Reply]:
        """Ask the servers; for `ServerLookup`."""
        if pull.training:
            self._ahead.add(pull.number)
        head = {
            "store": self._store,
            "batch": pull.number,
            "tables": pull.program.tables,
            "training": pull.training,
            "step": pull.step,
            "now": pull.now,
            "wire": self.wire,
            "done": taken(self._done),
        }
        self.keys_asked += pull.route.keys
        return [
            self._servers.peer(server).begin(
                "pull", {**head, "counts": pull.wanted[server]}, [pull.sent[server]]
            )
            for server in range(self.count)
        ]

    def send_claim(self, claim: WorkerLookup) -> Future[Message]:
        """Ask a worker; for `WorkerLookup`."""
        assert self._workers is not None
        if claim.training:
            self._ahead.add(claim.number)
        worker = claim.reference.worker
        head = {
            "engine": claim.program.name,
            "store": self._store,
            "batch": claim.number,
            "reference": claim.reference.name,
            "training": claim.training,
            "step": claim.step,
            "now": claim.now,
            **self._let_go(worker),
        }
        return self._workers.begin(
            *(worker, "claim", "claim", head),
            engine=self._engine(claim),
            references=[claim.reference],
            then=self._hear,
        )

    def _hear(self, answer: Message | Exception) -> None:
        """A worker tells of servers that have begun anew."""
        for server, life in answer.head["begun_anew"] if isinstance(answer, Message) else ():
            self._servers.note_loss(server, life)

    def reduce(self, plan: LookupPlan, addresses: Sequence[int], strides: Sequence[int]) -> Own:
        """See `Store.reduce`; trainers that wait for each other agree on what is finite."""
        assert plan.native is not None
        mine = plan.native.reduce(list(addresses), list(strides))
        return self._agreed(mine, mine.finite(), mine.touched(), plan.away.route.complete(mine))

    def hold(self, plan: LookupPlan, gradients: Sequence[Tensor | None]) -> Own:
        """See `Store.hold`; a worker will sum them by key."""
        claim: WorkerLookup = plan.away
        return self._agreed(
            claim.pack(gradients),
            claim.finite(gradients),
            claim.touched(gradients),
            all(each is not None for each in gradients),
        )

    def _agreed(
        self, made: _native.Gradients | Sent, finite: list[bool], touched: list[bool], complete: bool
    ) -> Own:
        if self._connection.world > 1 and self._connection.joint_steps:  # all step, or none
            flags = [*touched, *(not good for good in finite), not complete]
            agreed = (self._connection.here.sum(torch.tensor(flags, dtype=torch.float32)) > 0).tolist()
            slots = len(touched)
            touched, finite = agreed[:slots], [not bad for bad in agreed[slots:-1]]
            complete = not agreed[-1]
        return Own(made, finite, touched, complete)

    def update(
        self,
        program: LookupProgram,
        gradients: Sequence[tuple[LookupPlan, Own]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """See `Store.update`: gradients go to the servers, or to workers, in the background."""
        self.window.check()
        finite = [all(bits) for bits in zip(*(own.finite() for _, own in gradients), strict=True)]
        kept: dict[str, Any] = {}
        skipped = []
        for table, good in zip(program.tables, finite, strict=True):
            if table in rules and good:
                kept[table] = rule_to_json(rules[table])
            elif table in rules:
                skipped.append(table)
        lookups: list[ServerLookup | WorkerLookup] = [plan.away for plan, _ in gradients]
        numbers = [lookup.number for lookup in lookups]
        self._used.difference_update(numbers)
        self._sequence += 1
        head = {
            "store": self._store,
            "sequence": self._sequence,
            "batches": numbers,
            "rules": kept,
            "steps": {table: steps[table] for table in kept},
            "skipped": skipped,
            "complete": all(own.complete for _, own in gradients),
            "wire": self.wire,
        }
        places: dict[int | None, list[int]] = {}  # of the passes, by the worker that has the ids
        for place, lookup in enumerate(lookups):
            places.setdefault(
                lookup.reference.worker if isinstance(lookup, WorkerLookup) else None, []
            ).append(place)
        made = [own.made for _, own in gradients]
        calls = sum(self.count if worker is None else 1 for worker in places)
        pending = Countdown(calls, partial(self._applied, lookups), self.window.fail)
        self.window.sent(numbers)
        for worker, mine in places.items():
            if worker is None:
                self._push({**head, "mine": mine}, lookups, made, pending)
            else:
                self._push_by(worker, {**head, "mine": mine}, lookups, made, pending)

    def _applied(self, lookups: Sequence[ServerLookup | WorkerLookup]) -> None:
        """The gradients of these have been applied; they are held until then."""
        self.window.end([lookup.number for lookup in lookups])

    def _push(
        self, head: Mapping[str, Any], lookups: Sequence[Any], made: Sequence[Any], pending: Countdown
    ) -> None:
        """Send gradients to the servers."""
        scale = 1.0 / self._connection.divisor
        packed = [lookups[place].pack(made[place], scale, head["complete"]) for place in head["mine"]]
        told = {**head, "done": taken(self._done)}
        for server in range(self.count):
            arrays = [to_wire(pieces[server], self.wire) for pieces in packed]
            self._servers.peer(server).begin("push", told, arrays, then=partial(self._pushed, pending))

    def _pushed(self, pending: Countdown, reply: Reply) -> None:
        """A server has applied gradients, or has not, because it has restarted in between."""
        if reply.error is None:
            self.seconds["push"].append(reply.seconds)
        pending.one(reply.error)

    def _push_by(
        self,
        worker: int,
        head: Mapping[str, Any],
        lookups: Sequence[Any],
        made: Sequence[Any],
        pending: Countdown,
    ) -> None:
        """Send gradients of outputs to a worker."""
        assert self._workers is not None
        claims = [lookups[place] for place in head["mine"]]
        sent = [made[place] for place in head["mine"]]
        told = {
            **head,
            "engine": claims[0].program.name,
            "passes": [
                {"reference": claim.reference.name, "given": one.given}
                for claim, one in zip(claims, sent, strict=True)
            ],
            **self._let_go(worker),
        }
        self._workers.begin(
            *(worker, "backward", "backward", told, [one.array for one in sent]),
            engine=self._engine(claims[0]),
            references=[claim.reference for claim in claims],
            then=partial(self._pushed_by, pending),
        )

    def _pushed_by(self, pending: Countdown, answer: Message | Exception) -> None:
        """A worker has had gradients applied."""
        self._hear(answer)
        pending.one(answer if isinstance(answer, Exception) else None)

    def _engine(self, claim: WorkerLookup) -> dict[str, Any]:
        return {
            "engine": claim.program.name,
            "features": claim.program.told,
            "wire": self.wire,
            "tables": self._servers.declared,
            "declarations": self._servers.declarations,
        }

    def _let_go(self, worker: int) -> dict[str, Any]:
        """What a worker, and the servers by way of it, need not keep; and what it should know by now."""
        return {
            "done": taken(self._done_at[worker]),
            "gone": taken(self._gone_at[worker]),
            "declarations": self._servers.declarations,
        }

    def forget(self, number: int) -> None:
        """A lookup whose gradients have been sent, or will not be."""
        self._drop(None, number, self._done)

    def forget_claim(self, worker: int, number: int) -> None:
        """A claim whose gradients have been applied, or will not be."""
        self._drop(worker, number, self._done_at[worker])

    def _drop(self, worker: int | None, number: int, done: deque[int]) -> None:
        """Nobody holds a lookup any more. Called when memory is freed, at any moment, so nothing is sent."""
        if number in self._ahead:
            self._ahead.discard(number)
            self._withdrawn.append((worker, number))
        else:
            done.append(number)
        self.window.give_up(number)

    def _forget_withdrawn(self, withdrawn: list[tuple[int | None, int]]) -> None:
        # Not before servers have undone a lookup: they would take one that a worker is done with for trained.
        for worker, number in withdrawn:
            if worker is not None:
                self._done_at[worker].append(number)

    def _forget_ids(self, reference: IdsReference) -> None:
        assert self._workers is not None
        self._gone_at[reference.worker].append(reference.name)
        if self._workers.release is not None:
            self._workers.release(reference)
