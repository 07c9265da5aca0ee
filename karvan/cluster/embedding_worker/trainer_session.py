"""Embeds batches for a trainer, in its name and with its own code.

A `TrainerSession` speaks for one trainer and has its engines, each an `Embedding`; a batch of it is an
`Embedded`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from karvan import _native
from karvan.distributed.clients.parameter_servers import Servers
from karvan.embedding.feature_inputs import FeatureInput
from karvan.embedding.feature_program import features_from_json, make_program
from karvan.store.exchange.wire_format import from_wire, to_wire
from karvan.store.remote.server_lookup import ServerLookup, begin_pull
from karvan.wire import Array, RefusedError, Reply


class TrainerSession:
    """Speaks to the parameter servers for one trainer."""

    def __init__(self, servers: Servers, hello: Mapping[str, Any]) -> None:
        self.servers = servers
        self.scale = 1.0 / int(hello["divisor"])
        self.engines: dict[str, Embedding] = {}
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], Embedded] = {}  # by store and batch
        self._done: dict[int, list[int]] = {}  # by store: batches that servers need not keep
        self._begun_anew: list[tuple[int, str]] = []  # servers, and their new lives
        self.declarations = 0  # of tables, that the trainer has told of
        servers.on_restart(lambda server, life: self._begun_anew.append((server, life)))

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, store: int, batch: int, embedded: Embedded) -> None:
        """Until it is forgotten."""
        with self._lock:
            self._kept[store, batch] = embedded

    def kept(self, store: int, batch: int) -> Embedded | None:
        """What was kept."""
        with self._lock:
            return self._kept.get((store, batch))

    def forget(self, store: int, batches: Iterable[int]) -> None:
        """The trainer is done with these; servers hear of it with the next call."""
        with self._lock:
            for batch in batches:
                self._kept.pop((store, batch), None)
                self._done.setdefault(store, []).append(batch)

    def take_done(self, store: int) -> list[int]:
        """What servers have not heard of."""
        with self._lock:
            return self._done.pop(store, [])

    def declare(self, tables: Mapping[str, Mapping[str, Any]], declarations: int) -> None:
        """What servers that begin anew must know of tables."""
        for name, told in tables.items():
            self.servers.declare(name, **told)
        self.declarations = max(self.declarations, declarations)

    def take_begun_anew(self) -> list[tuple[int, str]]:
        """The servers that have begun anew, of which the trainer has not heard."""
        taken, self._begun_anew = self._begun_anew, []
        return taken

    def close(self) -> None:
        """Leave the servers."""
        self.servers.close()


class Embedding:
    """An engine of a trainer: features in their layouts, without rows."""

    def __init__(self, speaker: TrainerSession, features: Mapping[str, Any], wire: str) -> None:
        self._speaker = speaker
        self.count = len(speaker.servers)
        self.wire = wire
        self.features = features_from_json(features)
        self.program = make_program(self.features)
        dims = {feature.table: feature.dim for feature in self.program.features}
        self.dims = [dims[table] for table in self.program.tables]

    def group(self, ids: Mapping[str, Any]) -> Embedded:
        """Group a batch by key."""
        return Embedded(self, ids, {"training": True, "step": 0, "now": 0.0, "store": 0})

    def begin(self, ids: Mapping[str, Any], store: int, batch: int, head: Mapping[str, Any]) -> Embedded:
        """Group a batch by key, and ask the servers."""
        made = Embedded(self, ids, {**head, "store": store})
        made.pull.begin(batch)
        return made

    def send_pull(self, store: int, lookup: ServerLookup) -> list[Reply]:
        """Ask the servers for one of the trainer's stores."""
        done = self._speaker.take_done(store)
        return begin_pull(self._speaker.servers, lookup, store=store, done=done)

    def push(self, head: Mapping[str, Any], sums: Sequence[tuple[Tensor, ...]]) -> None:
        """Send sums by key, by pass and server, and wait until they have been applied.

        They are not by servers that have restarted since the lookup, which count what they contain.
        """
        names = ("store", "sequence", "batches", "mine", "rules", "steps", "skipped", "complete", "wire")
        told = {**{name: head[name] for name in names}, "done": self._speaker.take_done(int(head["store"]))}
        replies = []
        for server in range(self.count):
            arrays = [to_wire(pieces[server], self.wire) for pieces in sums]
            # Not behind lookups, which wait for those of other trainers, who may wait for this push.
            replies.append(self._speaker.servers.peer(server, "push").begin("push", told, arrays))
        for reply in replies:
            reply.wait()

    @property
    def scale(self) -> float:
        """What gradients are multiplied with."""
        return self._speaker.scale


class Embedded:
    """A batch between its lookup and its gradients."""

    def __init__(self, engine: Embedding, ids: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        self._engine = engine
        self.inputs: list[FeatureInput] = []
        for feature, table in engine.features.items():
            name = table.name or feature
            if feature not in ids:
                raise ValueError(
                    f"Feature '{feature}' of table '{name}' is not in the batch, "
                    f"which has: {', '.join(map(str, ids)) or 'nothing'}."
                )
            self.inputs.append(FeatureInput(feature, name, table, ids[feature]))
        plan = _native.prepare(engine.program.native, [one.arrays() for one in self.inputs])
        self.pull = ServerLookup(
            engine.program,
            plan,
            servers=engine.count,
            dims=engine.dims,
            wire=engine.wire,
            send=partial(engine.send_pull, int(head["store"])),
            training=bool(head["training"]),
            step=int(head["step"]),
            now=float(head["now"]),
        )
        self._sizes = [one.numel() for one in self.inputs]

    def finish(self) -> list[Tensor]:
        """The outputs of all features, once the servers have answered."""
        self.pull.finish()
        return [one.take_out() for one in self.inputs]

    def sum(self, array: Array, given: Sequence[int], complete: bool) -> tuple[Tensor, ...]:
        """Sum gradients of outputs by key: for each server, those of its keys.

        array: the gradients of the features whose places are given, one behind the other.
        """
        if any(type(place) is not int or not 0 <= place < len(self._sizes) for place in given):
            raise RefusedError(f"expected gradients of {len(self._sizes)} features, got some of {given}.")
        expected = sum(self._sizes[place] for place in given)
        kind = np.float32 if self._engine.wire == "float32" else np.uint16
        if array.shape != (expected,) or array.dtype != kind or len(set(given)) != len(given):
            raise RefusedError(
                f"expected {expected} gradients of {np.dtype(kind)}, got {array.dtype} {array.shape}."
            )
        if complete and len(given) < len(self._sizes):
            raise RefusedError(f"expected gradients of all {len(self._sizes)} features, got {len(given)}.")
        flat = from_wire(array, self._engine.wire)
        addresses, strides = [0] * len(self._sizes), [0] * len(self._sizes)
        at = 0
        for place in given:
            # An address of 0 would mean that there is no gradient; that of nothing at all is never read.
            addresses[place] = (
                flat.ctypes.data + 4 * at if self._sizes[place] else self.pull.sent[0].ctypes.data
            )
            strides[place] = self.inputs[place].table.dim
            at += self._sizes[place]
        made = self.pull.plan.reduce(addresses, strides)
        return self.pull.pack(made, self._engine.scale, complete)
