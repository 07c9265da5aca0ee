"""`ServerLookup`: a batch whose keys are looked up at parameter servers, and the `pull` request for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch
from typing_extensions import override

from karvan.distributed.clients.parameter_servers import Servers
from karvan.native import _native, output_buffers
from karvan.store.exchange import partial_gradients
from karvan.store.exchange.message_layout import cut, floats, words
from karvan.store.exchange.wire_format import from_wire
from karvan.store.program import LookupProgram
from karvan.store.remote.pending_lookup import PendingLookup
from karvan.store.types import LookupContext
from karvan.wire import Reply
from karvan.wire.schema import expect_array


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
        send: Callable[[ServerLookup], list[Reply]],
        forget: Callable[[int], None] = lambda number: None,
    ) -> None:
        super().__init__(program, context)
        self._send = send
        self._forget = forget
        self.wire = wire
        self.plan = plan
        self.replies: list[Reply] = []
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
        vectors = output_buffers.empty(sum(sizes))
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
        sent = output_buffers.empty(sum(sizes))
        if complete:
            self.route.pack_gradients(gradients, scale, sent.data_ptr())
        else:
            partial_gradients.pack(self.sent, self.requested, self.dims, gradients, scale, sent)
        return torch.split(sent, sizes)

    def __del__(self) -> None:
        if self.number:
            self._forget(self.number)


def begin_pull(servers: Servers, lookup: ServerLookup, *, store: int, done: Sequence[int]) -> list[Reply]:
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
            server, "pull", {**head, "counts": lookup.requested[server]}, [lookup.sent[server]]
        )
        for server in range(len(servers))
    ]
