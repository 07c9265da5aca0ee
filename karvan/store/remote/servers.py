"""Lookups and updates that the trainer carries out with the parameter servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from karvan.distributed.parameter_servers import Servers
from karvan.native import _native
from karvan.protocol.parameter_server import PULL, PUSH
from karvan.store import messages
from karvan.store.messages import cut, floats, from_wire, to_wire, words
from karvan.store.program import LookupProgram, empty
from karvan.store.remote.staleness_window import Countdown, LookupsInFlight, PendingLookup
from karvan.store.types import LookupContext
from karvan.wire import Reply
from karvan.wire.schema import expect_array

# `ServerLookup`: a batch whose keys are looked up at parameter servers, and the `pull` request for it.


class ServerLookup(PendingLookup):
    """A batch whose keys are, or will be, looked up.

    dims: of the program's tables. wire: the number format in which vectors are sent. send: asks the servers,
    see `begin_pull`. forget: called with the number of a lookup that nobody holds any more, at any moment.
    """

    def __init__(
        self,
        program: LookupProgram,
        plan: _native.Plan,
        context: LookupContext,
        *,
        servers: int,
        dims: Sequence[int],
        wire: str,
        send: Callable[[ServerLookup], list[Reply[Any]]],
        forget: Callable[[int], None] = lambda number: None,
    ) -> None:
        super().__init__(program, context)
        self._send = send
        self._forget = forget
        self.wire = wire
        self.plan = plan
        self.replies: list[Reply[Any]] = []
        slots = len(program.tables)
        self.route = _native.Route(plan, servers, True)
        counts = self.route.counts
        self.requested = [counts[server * slots : (server + 1) * slots] for server in range(servers)]
        self.dims = list(dims)
        sizes = [words(sum(of_server)) for of_server in self.requested]
        message = torch.empty(sum(sizes), dtype=torch.int64)
        self.route.pack_keys(message.data_ptr())
        self.sent = cut(message, sizes)

    def _ask(self) -> None:
        self.replies = self._send(self)

    @override
    def ready(self) -> tuple[bool, float]:
        waiting = not all(reply.done for reply in self.replies)
        return waiting, max(reply.started + reply.seconds for reply in self.replies)

    @override
    def finish(self) -> None:
        sizes = floats(self.requested, self.dims)
        vectors = empty(sum(sizes))
        flat, at = vectors.numpy(), 0
        for reply, size in zip(self.replies, sizes, strict=True):
            array = reply.wait().arrays[0]
            received = from_wire(expect_array(array, "vectors", array.dtype.name, size), self.wire)
            np.copyto(flat[at : at + size], received)
            at += size
        self.route.pool(vectors.data_ptr())

    def pack(self, gradients: _native.Gradients, scale: float, complete: bool) -> tuple[torch.Tensor, ...]:
        """Gradients times scale for each server, in the order of its keys; see `partial_gradients`."""
        sizes = floats(self.requested, self.dims)
        sent = empty(sum(sizes))
        if complete:
            self.route.pack_gradients(gradients, scale, sent.data_ptr())
        else:
            messages.pack(self.sent, self.requested, self.dims, gradients, scale, sent)
        return torch.split(sent, sizes)

    def __del__(self) -> None:
        if self.number:
            self._forget(self.number)


def begin_pull(
    servers: Servers, lookup: ServerLookup, *, store: int, done: Sequence[int]
) -> list[Reply[Any]]:
    """Ask each server for its keys, without waiting; done: the lookups that servers can release."""
    head = {
        "store": store,
        "batch": lookup.number,
        "tables": lookup.program.tables,
        **asdict(lookup.context),
        "wire": lookup.wire,
        "done": list(done),
    }
    return [
        servers.begin_training(
            server, PULL, {**head, "counts": lookup.requested[server]}, [lookup.sent[server]]
        )
        for server in range(len(servers))
    ]


# `ServerBatches`: the batches whose ids are local, for which a trainer asks parameter servers itself.


@dataclass
class ServerBatches:
    """Lookups at the servers, and the gradients that return to them."""

    _servers: Servers
    _store: int
    _wire: str
    _lookups: LookupsInFlight
    keys_asked: int = 0  # distinct keys of batches so far

    def __post_init__(self) -> None:
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

    def _send(self, lookup: ServerLookup) -> list[Reply[Any]]:
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
            lookup.pack(gradient, scale, head["complete"])
            for lookup, gradient in zip(lookups, gradients, strict=True)
        ]
        sent = {**head, "done": self._lookups.take_done(None)}
        for server in range(len(self._servers)):
            arrays = [to_wire(pieces[server], self._wire) for pieces in packed]
            self._servers.begin_training(server, PUSH, sent, arrays, then=partial(self._pushed, pending))

    def _pushed(self, pending: Countdown, reply: Reply[Any]) -> None:
        """A server has applied gradients, or has not, because it has restarted in between."""
        if reply.error is None:
            self.seconds["push"].append(reply.seconds)
        pending.one(reply.error)
