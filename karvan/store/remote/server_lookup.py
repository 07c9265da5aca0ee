"""`ServerLookup`: a batch whose keys are looked up at parameter servers."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from karvan import _native, output_buffers
from karvan.store.base import LookupProgram
from karvan.store.exchange import partial_gradients
from karvan.store.exchange.message_layout import cut, floats, words
from karvan.store.exchange.wire_format import from_wire
from karvan.store.remote.pending_lookup import PendingLookup
from karvan.wire import Reply
from karvan.wire.schema.calls import expect_array


class Puller(Protocol):
    """Who sends a pull and hears when it is not needed any more."""

    count: int  # of servers
    wire: str

    def dim(self, table: str) -> int:
        """The floats of a vector."""

    def send_pull(self, pull: ServerLookup) -> list[Reply]:
        """Ask the servers."""

    def forget(self, number: int) -> None:
        """A lookup whose gradients have been sent, or will not be."""


class ServerLookup(PendingLookup):
    """A batch whose keys are to be looked up, or are."""

    def __init__(
        self,
        store: Puller,
        program: LookupProgram,
        plan: _native.Plan,
        *,
        training: bool,
        step: int,
        now: float,
    ) -> None:
        super().__init__(program, training=training, step=step, now=now)
        self._store = store
        self.plan = plan
        self.replies: list[Reply] = []
        servers, slots = store.count, len(program.tables)
        self.route = _native.Route(plan, servers, True)
        counts = self.route.counts
        self.wanted = [counts[server * slots : (server + 1) * slots] for server in range(servers)]
        self.dims = [store.dim(table) for table in program.tables]
        sizes = [words(sum(of_server)) for of_server in self.wanted]
        message = torch.empty(sum(sizes), dtype=torch.int64)
        self.route.pack_keys(message.data_ptr())
        self.sent = cut(message, sizes)

    def _ask(self) -> None:
        self.replies = self._store.send_pull(self)

    def ready(self) -> tuple[bool, float]:
        """See `PendingLookup.ready`."""
        waiting = not all(reply.done for reply in self.replies)
        return waiting, max(reply.begun + reply.seconds for reply in self.replies)

    def finish(self) -> None:
        """See `PendingLookup.finish`."""
        sizes = floats(self.wanted, self.dims)
        vectors = output_buffers.empty(sum(sizes))
        flat, at = vectors.numpy(), 0
        for reply, size in zip(self.replies, sizes, strict=True):
            array = reply.wait().arrays[0]
            received = from_wire(expect_array(array, "vectors", array.dtype.name, size), self._store.wire)
            np.copyto(flat[at : at + size], received)
            at += size
        self.route.pool(vectors.data_ptr())

    def pack(self, gradients: _native.Gradients, scale: float, complete: bool) -> tuple[torch.Tensor, ...]:
        """Gradients times scale for each server, in the order of its keys; see `partial_gradients`."""
        sizes = floats(self.wanted, self.dims)
        sent = output_buffers.empty(sum(sizes))
        if complete:
            self.route.pack_gradients(gradients, scale, sent.data_ptr())
        else:
            partial_gradients.pack(self.sent, self.wanted, self.dims, gradients, scale, sent)
        return torch.split(sent, sizes)

    def __del__(self) -> None:
        if self.number:
            self._store.forget(self.number)
