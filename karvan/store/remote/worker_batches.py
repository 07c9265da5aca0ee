"""`WorkerBatches`: the batches whose ids embedding workers hold.

A worker looks the ids up on behalf of the trainer, and sums the gradients of its outputs by key. Batches and
pushes have the trainer's numbers, so a worker that replaces another can repeat its requests: servers do each
only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

from karvan.distributed.clients.embedding_workers import Workers
from karvan.distributed.clients.parameter_servers import Servers
from karvan.ragged import IdsReference
from karvan.store.program import LookupProgram
from karvan.store.remote.lookups_in_flight import LookupsInFlight
from karvan.store.remote.staleness_window import Countdown
from karvan.store.remote.worker_lookup import Sent, WorkerLookup
from karvan.store.types import LookupContext
from karvan.wire import Message


class WorkerBatches:
    """Lookups that workers make, and the gradients that return to them."""

    def __init__(
        self, workers: Workers, servers: Servers, store: int, wire: str, lookups: LookupsInFlight
    ) -> None:
        self._workers = workers
        self._servers = servers
        self._store = store
        self._wire = wire
        self._lookups = lookups

    def __len__(self) -> int:
        return len(self._workers)

    def make(self, program: LookupProgram, reference: IdsReference, context: LookupContext) -> WorkerLookup:
        """A lookup of a batch by the worker that has its ids."""
        self._workers.watch(reference)
        return WorkerLookup(
            program,
            reference,
            context,
            wire=self._wire,
            send=self._send,
            forget=partial(self._lookups.drop, reference.worker),
        )

    def _send(self, lookup: WorkerLookup) -> Future[Message]:
        if lookup.context.training:
            self._lookups.add(lookup.number)
        worker = lookup.reference.worker
        head = {
            "engine": lookup.program.name,
            "store": self._store,
            "batch": lookup.number,
            "reference": lookup.reference.name,
            **asdict(lookup.context),
            **self._released(worker),
        }
        return self._workers.begin(
            *(worker, "claim", "claim", head),
            engine=self._engine(lookup),
            references=[lookup.reference],
            # A worker does not know what this trainer has committed: servers must, before they are asked.
            first=self._servers.commits.flush,
            then=self._note_restarts,
        )

    def push(
        self,
        worker: int,
        head: Mapping[str, Any],
        lookups: Sequence[WorkerLookup],
        gradients: Sequence[Sent],
        pending: Countdown,
    ) -> None:
        """Send gradients of outputs to a worker; `pending` counts its answer."""
        sent = {
            **head,
            "engine": lookups[0].program.name,
            "passes": [
                {"reference": lookup.reference.name, "given": one.given}
                for lookup, one in zip(lookups, gradients, strict=True)
            ],
            **self._released(worker),
        }
        self._workers.begin(
            *(worker, "backward", "backward", sent, [one.array for one in gradients]),
            engine=self._engine(lookups[0]),
            references=[lookup.reference for lookup in lookups],
            then=partial(self._pushed, pending),
        )

    def _pushed(self, pending: Countdown, answer: Message | Exception) -> None:
        """The gradients that were sent to a worker have been applied, or staged."""
        self._note_restarts(answer)
        pending.one(answer if isinstance(answer, Exception) else None)

    def _note_restarts(self, answer: Message | Exception) -> None:
        """A worker reports servers that have restarted."""
        for server, life in answer.head["restarted_servers"] if isinstance(answer, Message) else ():
            self._servers.report_restart(server, life)

    def _engine(self, lookup: WorkerLookup) -> dict[str, Any]:
        return {
            "engine": lookup.program.name,
            "features": lookup.program.features_json,
            "wire": self._wire,
            "tables": self._servers.declared,
            "declarations": self._servers.declarations,
        }

    def _released(self, worker: int) -> dict[str, Any]:
        """What a worker, and the servers through it, can release, and the declarations it should know."""
        return {
            "done": self._lookups.take_done(worker),
            "gone": self._workers.take_gone(worker),
            "declarations": self._servers.declarations,
        }
