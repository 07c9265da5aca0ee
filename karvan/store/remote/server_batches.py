"""`ServerBatches`: the batches whose ids are local, for which a trainer asks parameter servers itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from karvan.distributed.clients.parameter_servers import Servers
from karvan.native import _native
from karvan.store.exchange.wire_format import to_wire
from karvan.store.program import LookupProgram
from karvan.store.remote.lookups_in_flight import LookupsInFlight
from karvan.store.remote.server_lookup import ServerLookup, begin_pull
from karvan.store.remote.staleness_window import Countdown
from karvan.store.types import LookupContext
from karvan.wire import Reply


class ServerBatches:
    """Lookups at the servers, and the gradients that return to them."""

    def __init__(
        self,
        servers: Servers,
        store: int,
        wire: str,
        lookups: LookupsInFlight,
    ) -> None:
        self._servers = servers
        self._store = store
        self._wire = wire
        self._lookups = lookups
        self.keys_asked = 0  # distinct keys of batches so far
        # Seconds from a call to its answer, of the last ones.
        self.seconds: dict[str, deque[float]] = {"pull": deque(maxlen=4096), "push": deque(maxlen=4096)}

    def make(
        self, program: LookupProgram, plan: _native.Plan, context: LookupContext, dims: Sequence[int]
    ) -> ServerLookup:
        """A lookup of a batch that was grouped by key."""
        return ServerLookup(
            program,
            plan,
            context,
            servers=len(self._servers),
            dims=dims,
            wire=self._wire,
            send=self._send,
            forget=partial(self._lookups.drop, None),
        )

    def _send(self, lookup: ServerLookup) -> list[Reply]:
        if lookup.context.training:
            self._lookups.add(lookup.number)
        self.keys_asked += lookup.route.keys
        return begin_pull(self._servers, lookup, store=self._store, done=self._lookups.take_done(None))

    def note_answers(self, lookup: ServerLookup) -> None:
        """A lookup has its answers: record how long they took."""
        self.seconds["pull"] += [reply.seconds for reply in lookup.replies]

    def push(
        self,
        head: Mapping[str, Any],
        lookups: Sequence[ServerLookup],
        gradients: Sequence[_native.Gradients],
        scale: float,
        pending: Countdown,
    ) -> None:
        """Send gradients, times scale, to the servers; `pending` counts their answers."""
        packed = [
            lookup.pack(one, scale, head["complete"]) for lookup, one in zip(lookups, gradients, strict=True)
        ]
        sent = {**head, "done": self._lookups.take_done(None)}
        for server in range(len(self._servers)):
            arrays = [to_wire(pieces[server], self._wire) for pieces in packed]
            self._servers.begin_training(server, "push", sent, arrays, then=partial(self._pushed, pending))

    def _pushed(self, pending: Countdown, reply: Reply) -> None:
        """A server has applied gradients, or has not, because it has restarted in between."""
        if reply.error is None:
            self.seconds["push"].append(reply.seconds)
        pending.one(reply.error)
