"""`RemoteStore`: rows on parameter servers, each of which owns a range of the key hashes.

A lookup groups the batch by key, sorts the distinct keys by server (`Route`) and sends each server its share.
Gradients, summed by key, return the same way without their keys, because a server remembers the request.
Lookups run ahead of the computation and gradients return in the background, as far as the bound on staleness
allows (`StalenessWindow`). With a bound of 1 a lookup starts when the gradients of the previous batch have
been applied, and results are bit-identical to those of a store in memory.

The store's parts are `ServerBatches` and `WorkerBatches` for batches whose ids are local or at an embedding
worker, `RemoteTable` for entire tables, and `LookupsInFlight`, which these share. Servers hold a capture,
write it into a folder and read it from there; trainers agree on its moment.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.distributed import Connection
from karvan.distributed.parameter_servers import StepCommits
from karvan.errors import is_temporary
from karvan.native import _native
from karvan.protocol import parameter_server as protocol
from karvan.ragged import IdsReference
from karvan.store.base import SharedStore
from karvan.store.messages import hashes_of, owners_of, rule_to_json, spec_to_json
from karvan.store.program import LookupInputs, LookupPlan, LookupProgram, Passes, Prepared
from karvan.store.remote.servers import ServerBatches, ServerLookup
from karvan.store.remote.staged_updates import StagedUpdates
from karvan.store.remote.staleness_window import Countdown, LookupsInFlight, StalenessWindow
from karvan.store.remote.tables import RemoteTable, TableCalls
from karvan.store.remote.workers import Sent, WorkerBatches, WorkerLookup
from karvan.store.types import (
    Capture,
    Counts,
    Found,
    GradientFlags,
    Keys,
    LookupContext,
    PerTable,
    Push,
    Rows,
    Rules,
    StalenessStats,
    TableSpec,
)
from karvan.wire import Reply, WireError
from karvan.wire.schema import A, Call, expect_array

_log = logging.getLogger("karvan.store")

_SAVING = 24 * 3600.0  # seconds for calls that depend on the size of tables; heartbeats come meanwhile


@dataclass(eq=False)
class LocalGradients(GradientFlags):
    """Gradients that have not been sent yet. The flags are the same on all trainers that step together.

    made: sums by key, or, for a worker, gradients of outputs. complete: no feature lacks a gradient.
    """

    made: _native.Gradients | Sent
    complete: bool


class RemoteStore(SharedStore):
    """Tables that are spread over parameter servers."""

    def __init__(self, connection: Connection) -> None:
        assert connection.servers is not None
        self._connection = connection
        self._servers = servers = connection.servers
        self._server_count = len(servers)
        self._store = servers.new_store()
        self._wire = wire = connection.settings.wire
        self._lookups = LookupsInFlight(servers, self._store, connection.settings.staleness)
        self._calls = TableCalls(connection, servers, self._lookups)
        self._tables: dict[str, RemoteTable] = {}
        self._sequences = [0] * connection.world_size  # of each trainer's last push, at the last capture
        self.at_servers = ServerBatches(servers, self._store, wire, self._lookups)
        self.at_workers: WorkerBatches | None = None
        if connection.workers is not None:
            self.takes_references = True
            self.at_workers = WorkerBatches(connection.workers, servers, self._store, wire, self._lookups)
        self._elastic: StagedUpdates | None = None
        if isinstance(servers.commits, StepCommits):
            at = (self.at_servers, self.at_workers)
            self._elastic = StagedUpdates(servers.commits, *at, self.window, len(servers))
        self._last_lookup = time.monotonic()  # the time of the last training lookup
        servers.on_restart(_note_loss)

    @property
    def window(self) -> StalenessWindow:
        """The batches between lookup and acknowledged gradient."""
        return self._lookups.window

    @property
    @override
    def staleness(self) -> StalenessStats:
        return StalenessStats(self.window.lookups, self.window.total, self.window.most)

    @property
    @override
    def share(self) -> tuple[int, int]:
        """Of the rows that pass through this process."""
        return self._connection.rank, self._connection.world_size

    @property
    def lost_updates(self) -> int:
        """How many updates of all trainers are not in the rows, because servers have restarted.

        A push to two servers is two updates. Of other trainers only the number of updates at the last save is
        known, so the result is the same on all trainers once a fit has ended with its save.
        """
        if not self._servers.reloads:
            return 0
        self._lookups.drain()
        sequences = list(self._sequences)
        sequences[self._connection.rank] = self._lookups.sequence
        answers = self._servers.call(protocol.UPDATES, {"store": self._store})
        return sum(
            max(0, number - answer.head.trainers.get(str(trainer), 0))
            for answer in answers
            for trainer, number in enumerate(sequences)
        )

    @override
    def add_table(self, spec: TableSpec) -> None:
        """Each server holds its part of the rows that a policy allows."""
        self._servers.call(protocol.ADD_TABLE, {"spec": spec_to_json(spec)}, channel="train")
        self._tables[spec.name] = RemoteTable(spec, self._calls)
        self._servers.declare(spec.name, spec=spec_to_json(spec))

    @override
    def table(self, name: str) -> RemoteTable:
        return self._tables[name]

    @override
    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """One request for all."""
        return {table: stats["rows"] for table, stats in self._calls.stats(tables).items()}

    @override
    def prepare(
        self, program: LookupProgram, inputs: LookupInputs, context: LookupContext | None = None
    ) -> Prepared:
        """A lookup whose purpose is known starts as soon as staleness allows."""
        lookup = self._make_lookup(program, inputs, context or LookupContext(training=False), ahead=True)
        if context is not None and self._looks_ahead:
            if context.training:
                lookup.offered = True
                self.window.offer(lookup)
            else:
                self._begin_evaluation(lookup)
        return lookup

    @override
    def forward(
        self, program: LookupProgram, inputs: LookupInputs | Prepared, context: LookupContext
    ) -> LookupPlan:
        self.window.check()
        self._lookups.send_withdrawn()
        lookup: ServerLookup | WorkerLookup
        if isinstance(inputs, ServerLookup | WorkerLookup):
            lookup = inputs
            if not lookup.fits(context):
                batch = inputs.plan if isinstance(inputs, ServerLookup) else inputs.reference
                lookup = self._make_lookup(program, batch, context)
        else:
            lookup = self._make_lookup(program, inputs, context)
        if context.training:
            self.window.need(lookup)
            self._watch(lookup)
            self._lookups.use(lookup.number)
        elif not lookup.started:
            self._begin_evaluation(lookup)
        lookup.finish()
        if isinstance(lookup, ServerLookup):
            self.at_servers.note_answers(lookup)
        return LookupPlan(lookup.plan if isinstance(lookup, ServerLookup) else None, {}, lookup)

    @property
    def _looks_ahead(self) -> bool:
        """Whether lookups start before their batch's turn, and so perhaps for batches that are never used."""
        return self._connection.settings.staleness > 1

    def _begin_evaluation(self, lookup: ServerLookup | WorkerLookup) -> None:
        """Start a lookup that sees all gradients of this trainer."""
        if self.at_workers is not None:  # otherwise lookups and gradients share one ordered channel
            self.window.drain()
        lookup.begin(0)

    def _make_lookup(
        self,
        program: LookupProgram,
        inputs: LookupInputs | Prepared,
        context: LookupContext,
        *,
        ahead: bool = False,
    ) -> ServerLookup | WorkerLookup:
        if isinstance(inputs, IdsReference):
            workers = 0 if self.at_workers is None else len(self.at_workers)
            if self.at_workers is None or inputs.worker >= workers:
                raise ValueError(f"Expected a reference to one of {workers} embedding workers, got {inputs}.")
            return self.at_workers.make(program, inputs, context)
        if isinstance(inputs, list):
            make = _native.prepare if ahead else _native.Plan
            inputs = make(program.native, inputs)
        assert isinstance(inputs, _native.Plan)
        dims = [self._tables[table].dim for table in program.tables]
        return self.at_servers.make(program, inputs, context, dims)

    def _watch(self, lookup: ServerLookup | WorkerLookup) -> None:
        """Report to the window whether a lookup that ran ahead was ready in time."""
        now = time.monotonic()
        step, self._last_lookup = now - self._last_lookup, now
        if lookup.offered:
            waited, ready = lookup.ready()
            self.window.used(waited, (now - ready) / step)

    @override
    def reduce(self, plan: LookupPlan, addresses: Sequence[int], strides: Sequence[int]) -> LocalGradients:
        """Trainers that wait for each other agree on what is finite."""
        lookup = _lookup_of(plan)
        assert isinstance(lookup, ServerLookup)
        mine = lookup.plan.reduce(list(addresses), list(strides))
        return self._agreed(mine, mine.finite(), mine.touched(), lookup.route.complete(mine))

    @override
    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> LocalGradients:
        """A worker will sum them by key."""
        lookup = _lookup_of(plan)
        assert isinstance(lookup, WorkerLookup)
        return self._agreed(
            lookup.pack(gradients),
            lookup.finite(gradients),
            lookup.touched(gradients),
            all(gradient is not None for gradient in gradients),
        )

    def _agreed(
        self, sums: _native.Gradients | Sent, finite: list[bool], touched: list[bool], complete: bool
    ) -> LocalGradients:
        together = self._connection.world_size > 1 and self._connection.joint_steps
        if together and self._elastic is None:  # all step, or none; in an elastic run a commit decides that
            flags = [*touched, *(not good for good in finite), not complete]
            agreed = (self._connection.here.sum(torch.tensor(flags, dtype=torch.float32)) > 0).tolist()
            slots = len(touched)
            touched, finite = agreed[:slots], [not bad for bad in agreed[slots:-1]]
            complete = not agreed[-1]
        return LocalGradients(finite, touched, sums, complete)

    @override
    def update(
        self, program: LookupProgram, gradients: Passes[LocalGradients], rules: Rules, steps: PerTable
    ) -> None:
        """Gradients are sent to the servers, or to workers, in the background.

        In an elastic run they are staged, and applied when the step is committed (`StagedUpdates`).
        """
        self.window.check()
        finite = [all(bits) for bits in zip(*(gradient.finite() for _, gradient in gradients), strict=True)]
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
            "complete": all(gradient.complete for _, gradient in gradients),
            "wire": self._wire,
        }
        send = self._push if self._elastic is None else self._elastic.stage
        send(head, lookups, [gradient.made for _, gradient in gradients])

    def _push(self, head: Mapping[str, Any], lookups: Sequence[Any], sums: Sequence[Any]) -> None:
        """Send gradients to the servers, and to the workers that have the ids of some passes."""
        passes: dict[int | None, list[int]] = {}  # positions of the passes, by the worker that has the ids
        for position, lookup in enumerate(lookups):
            worker = lookup.reference.worker if isinstance(lookup, WorkerLookup) else None
            passes.setdefault(worker, []).append(position)
        calls = sum(self._server_count if worker is None else 1 for worker in passes)
        pending = Countdown(calls, partial(self._applied, lookups), self.window.fail)
        self.window.sent(head["batches"])
        for worker, mine in passes.items():
            named = {**head, "mine": mine}
            chosen = [lookups[position] for position in mine]
            gradients = [sums[position] for position in mine]
            if worker is None:
                self.at_servers.push(named, chosen, gradients, 1.0 / self._connection.divisor, pending)
            else:
                assert self.at_workers is not None
                self.at_workers.push(worker, named, chosen, gradients, pending)

    def _applied(self, lookups: Sequence[ServerLookup | WorkerLookup]) -> None:
        """The gradients of these lookups have been applied; the lookups are held until then."""
        self.window.end([lookup.number for lookup in lookups])

    @override
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        """The servers that have the keys look them up."""
        self._lookups.drain()
        owners = {
            table: owners_of(hashes_of(unique), self._server_count) for table, (unique, _) in keys.items()
        }
        head = {"tables": list(keys), **asdict(context)}
        replies = []
        for server in range(self._server_count):
            arrays: list[NDArray[Any]] = []
            for table, (unique, counts) in keys.items():
                mine = owners[table] == server
                arrays += [unique[mine], counts[mine]]
            replies.append(self._servers.peer(server, "ask").begin(protocol.LOOKUP, head, arrays))
        answers = [reply.wait() for reply in replies]
        tables = {}
        for number, (table, (unique, _)) in enumerate(keys.items()):
            vectors = np.empty((len(unique), self._tables[table].dim), np.float32)
            for server, answer in enumerate(answers):
                mine = owners[table] == server
                shape = int(mine.sum()), self._tables[table].dim
                vectors[mine] = expect_array(answer.arrays[number], "vectors", "float32", *shape)
            tables[table] = Found(vectors, 0)
        return tables

    @override
    def apply(self, pushes: Mapping[str, Sequence[Push]], rules: Rules, steps: PerTable) -> None:
        """Gradients of rows that were removed do no harm: they insert nothing."""
        self._lookups.drain()
        head = {
            "rules": {table: rule_to_json(rules[table]) for table in pushes},
            "steps": {table: steps[table] for table in pushes},
            "numbers": {table: len(listed) for table, listed in pushes.items()},
        }
        replies = []
        for server in range(self._server_count):
            arrays: list[NDArray[Any]] = []
            for listed in pushes.values():
                for push in listed:
                    mine = owners_of(hashes_of(push.keys), self._server_count) == server
                    arrays += [push.keys[mine], push.gradients[mine]]
            replies.append(self._servers.peer(server, "ask").begin(protocol.APPLY, head, arrays))
        for reply in replies:
            reply.wait()

    @override
    def capture(
        self, tables: Sequence[str], parts: PerTable, since: PerTable | None = None, *, track: bool = False
    ) -> Capture:
        """This is a collective of all trainers.

        Lookups that run ahead may be answered at any time meanwhile; servers omit all those whose batch has
        neither had a push nor been used.
        """
        self._lookups.settle()
        channel = self._connection.here
        # After this the servers have the gradients of all trainers. A lookup without a gradient may have been
        # used, which servers may not know yet, so the capture names these; in an elastic run they count once
        # servers know that they are done.
        used = [] if self._servers.commits.elastic else self._lookups.take_used()
        trainers = channel.gather_json([self._lookups.sequence, used])
        self._sequences = [sequence for sequence, _ in trainers]
        outcome: dict[str, Any] = {}
        if channel.rank == 0:
            number = secrets.randbits(52)
            head = {"capture": number, "tables": list(tables), "parts": dict(parts), "track": track}
            head |= {"store": self._store, "used": [used for _, used in trainers]}
            before = None if since is None else max(since.values(), default=0)
            try:
                # On the channel on which the previous capture was closed, so that it is closed by now.
                self._servers.call(protocol.CAPTURE, {**head, "since": before}, channel="save")
                outcome["number"] = number
            except Exception as error:  # raised on all trainers below
                self.close_capture(number)  # on the servers that have it
                outcome["error"] = [type(error).__name__, str(error), is_temporary(error)]
        outcome = channel.gather_json(outcome)[0]
        if "error" in outcome:
            kind, text, temporary = outcome["error"]
            if temporary:
                raise WireError(text)
            raise ValueError(text) if kind == "ValueError" else RuntimeError(text)
        return _ServerCapture(self, tables, outcome["number"])

    def close_capture(self, number: int) -> None:
        """Close a capture that is not needed any more."""
        if self._connection.rank == 0:
            self._begin_at_all(protocol.CLOSE_CAPTURE, {"capture": number})

    @override
    def save_tables(
        self,
        capture: Capture,
        folder: str,
        tables: Mapping[str, Mapping[str, Any]],
        waiting: Callable[[], None],
        *,
        writers: int,
    ) -> list[dict[str, Any]]:
        assert isinstance(capture, _ServerCapture)
        options = {name: dict(settings) for name, settings in tables.items()}
        head = {"capture": capture.number, "store": self._store, "folder": folder}
        head |= {"tables": options, "writers": writers}  # in this order: the bytes of messages are pinned
        replies = self._begin_at_all(protocol.SAVE, head, deadline=_SAVING)
        while not all(reply.done for reply in replies):
            waiting()
            replies[0].pause(0.05)
        return [reply.wait().head.shares for reply in replies]

    @override
    def fill_tables(self, path: str, tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        self._lookups.drain()
        head = {"path": path, "tables": {name: dict(options) for name, options in tables.items()}}
        answers = [reply.wait() for reply in self._begin_at_all(protocol.FILL, head, deadline=_SAVING)]
        return [(path, problem) for answer in answers for path, problem in answer.head.damaged]

    def _begin_at_all(self, call: Call[Any, A], head: Mapping[str, Any], **options: Any) -> list[Reply[A]]:
        """Ask all servers about a checkpoint, without waiting."""
        servers = range(self._server_count)
        return [self._servers.peer(server, "save").begin(call, head, **options) for server in servers]


class _ServerCapture(Capture):
    """A capture that servers hold. They write it; it cannot be read here."""

    def __init__(self, store: RemoteStore, tables: Sequence[str], number: int) -> None:
        self._store = store
        self.number = number
        self.versions = dict.fromkeys(tables, number)
        self._open = True

    @override
    def part(self, table: str, part: int) -> Rows:
        raise TypeError("Servers write their captures themselves; use SharedStore.save_tables.")

    @override
    def erased(self, table: str) -> Keys:
        raise TypeError("Servers write their captures themselves; use SharedStore.save_tables.")

    @override
    def close(self) -> None:
        if self._open:
            self._open = False
            self._store.close_capture(self.number)


def _lookup_of(plan: LookupPlan) -> ServerLookup | WorkerLookup:
    assert isinstance(plan.remote, ServerLookup | WorkerLookup)
    return plan.remote


def _note_loss(server: int, life: str) -> None:
    _log.warning(
        "Parameter server %d has restarted with the rows of the last checkpoint: later updates are lost.",
        server,
    )
