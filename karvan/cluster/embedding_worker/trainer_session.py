"""Embeds batches on behalf of a trainer, with the trainer's own code.

A `TrainerSession` acts for one trainer and has its engines, each an `Embedding`; one of its batches is an
`Embedded`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from karvan.clock import clock
from karvan.distributed.parameter_servers import Servers
from karvan.embedding.feature_inputs import FeatureInput, absent_ids, features_from_json, make_program
from karvan.native import _native
from karvan.protocol.embedding_worker import PushPasses, WorkerHello
from karvan.protocol.parameter_server import PUSH
from karvan.protocol.values import DeclaredTable
from karvan.store.messages import from_wire, to_wire
from karvan.store.remote.servers import ServerLookup, begin_pull
from karvan.store.types import LookupContext
from karvan.wire import Array, RefusedError, Reply


class TrainerSession:
    """Calls the parameter servers on behalf of one trainer."""

    def __init__(self, servers: Servers, hello: WorkerHello) -> None:
        self.servers = servers
        self.scale = 1.0 / hello.divisor
        self.engines: dict[str, Embedding] = {}
        self._lock = threading.Lock()
        self._batches: dict[tuple[int, int], Embedded] = {}  # by store and batch
        self._done: dict[int, list[int]] = {}  # by store: batches that servers may release
        self._restarted: list[tuple[int, str]] = []  # servers, and their new lives
        self.declarations = 0  # of tables, that the trainer has sent
        self._calls = 0  # in progress
        self._last_call = clock.now()
        servers.on_restart(lambda server, life: self._restarted.append((server, life)))

    def __len__(self) -> int:
        return len(self._batches)

    def begin_call(self) -> None:
        """A call of the trainer is executed, until `end_call`."""
        with self._lock:
            self._calls += 1

    def end_call(self) -> None:
        """One call has ended."""
        with self._lock:
            self._calls -= 1
            self._last_call = clock.now()

    @property
    def silence(self) -> float:
        """Seconds since the trainer's last call."""
        with self._lock:
            return 0.0 if self._calls else clock.silence(self._last_call)

    def add(self, store: int, batch: int, embedded: Embedded) -> None:
        """Hold a batch until `forget`."""
        with self._lock:
            self._batches[store, batch] = embedded

    def find(self, store: int, batch: int) -> Embedded | None:
        """The batch, if it is held."""
        with self._lock:
            return self._batches.get((store, batch))

    def forget(self, store: int, batches: Iterable[int]) -> None:
        """The trainer is done with these; the next call to the servers reports it."""
        with self._lock:
            for batch in batches:
                self._batches.pop((store, batch), None)
                self._done.setdefault(store, []).append(batch)

    def take_done(self, store: int) -> list[int]:
        """Finished batches that were not reported to the servers yet."""
        with self._lock:
            return self._done.pop(store, [])

    def declare(self, tables: Mapping[str, DeclaredTable], declarations: int) -> None:
        """Remember the tables, for servers that restart."""
        for name, declaration in tables.items():
            self.servers.declare(name, **declaration.as_json())
        self.declarations = max(self.declarations, declarations)

    def take_restarted(self) -> list[tuple[int, str]]:
        """The servers that have restarted, as far as the trainer does not know yet."""
        restarted, self._restarted = self._restarted, []
        return restarted

    def close(self) -> None:
        """Disconnect from the servers."""
        self.servers.close()


class Embedding:
    """An engine of a trainer: features in their layouts, without rows."""

    def __init__(self, session: TrainerSession, features: Mapping[str, Any], wire: str) -> None:
        self._session = session
        self.count = len(session.servers)
        self.wire = wire
        self.features = features_from_json(features)
        self.program = make_program(self.features)
        dims = {feature.table: feature.dim for feature in self.program.features}
        self.dims = [dims[table] for table in self.program.tables]

    def group(self, ids: Mapping[str, Any]) -> Embedded:
        """Group a batch by key."""
        return Embedded(self, ids, 0, LookupContext(True, 0, 0.0))

    def begin(self, ids: Mapping[str, Any], store: int, batch: int, context: LookupContext) -> Embedded:
        """Group a batch by key, and ask the servers."""
        embedded = Embedded(self, ids, store, context)
        embedded.pull.begin(batch)
        return embedded

    def send_pull(self, store: int, lookup: ServerLookup) -> list[Reply]:
        """Ask the servers for one of the trainer's stores."""
        done = self._session.take_done(store)
        return begin_pull(self._session.servers, lookup, store=store, done=done)

    def push(self, head: PushPasses, sums: Sequence[tuple[Tensor, ...]]) -> None:
        """Send sums by key, by pass and server, and wait until they have been applied, or staged.

        Servers that have restarted since the lookup do not apply them; they count the updates they contain.
        """
        names = ("store", "sequence", "batches", "mine", "rules", "steps", "skipped", "complete", "wire")
        step = {} if head.step is None else {"step": head.step}  # of an elastic run, whose servers stage it
        request = {
            **{name: getattr(head, name) for name in names},
            **step,
            "done": self._session.take_done(head.store),
        }
        replies = []
        for server in range(self.count):
            arrays = [to_wire(pieces[server], self.wire) for pieces in sums]
            # Not queued behind lookups: they wait for those of other trainers, which may wait for this push.
            replies.append(self._session.servers.peer(server, "push").begin(PUSH, request, arrays))
        for reply in replies:
            reply.wait()

    @property
    def scale(self) -> float:
        """The factor by which gradients are multiplied."""
        return self._session.scale


class Embedded:
    """A batch between its lookup and its gradients."""

    def __init__(self, engine: Embedding, ids: Mapping[str, Any], store: int, context: LookupContext) -> None:
        self._engine = engine
        self.inputs: list[FeatureInput] = []
        for feature, table in engine.features.items():
            name = table.name or feature
            entry = ids.get(feature)
            if entry is None and table.missing == "empty":
                entry = absent_ids(ids)
            if entry is None:
                raise ValueError(
                    f"Feature '{feature}' of table '{name}' is not in the batch, "
                    f"which has: {', '.join(map(str, ids)) or 'nothing'}."
                )
            input_ = FeatureInput(feature, name, table, entry)
            if input_.lists is not None:
                raise ValueError(
                    f"Feature '{feature}' of table '{name}': expected a list of ids for each sample, as "
                    "embedding workers take them, got lists of lists; run the job without embedding workers."
                )
            self.inputs.append(input_)
        plan = _native.prepare(engine.program.native, [input_.arrays() for input_ in self.inputs])
        self.pull = ServerLookup(
            engine.program,
            plan,
            context,
            servers=engine.count,
            dims=engine.dims,
            wire=engine.wire,
            send=partial(engine.send_pull, store),
        )
        self._sizes = [input_.numel() for input_ in self.inputs]

    def finish(self) -> list[Tensor]:
        """The outputs of all features, once the servers have answered."""
        self.pull.finish()
        return [input_.take_out() for input_ in self.inputs]

    def sum(self, array: Array, positions: Sequence[int], complete: bool) -> tuple[Tensor, ...]:
        """Sum gradients of outputs by key: for each server, those of its keys.

        array: the gradients of the features at these positions, one after the other.
        """
        if any(type(position) is not int or not 0 <= position < len(self._sizes) for position in positions):
            raise RefusedError(f"expected gradients of {len(self._sizes)} features, got some of {positions}.")
        expected = sum(self._sizes[position] for position in positions)
        kind = np.float32 if self._engine.wire == "float32" else np.uint16
        if array.shape != (expected,) or array.dtype != kind or len(set(positions)) != len(positions):
            raise RefusedError(
                f"expected {expected} gradients of {np.dtype(kind)}, got {array.dtype} {array.shape}."
            )
        if complete and len(positions) < len(self._sizes):
            raise RefusedError(
                f"expected gradients of all {len(self._sizes)} features, got {len(positions)}."
            )
        flat = from_wire(array, self._engine.wire)
        addresses, strides = [0] * len(self._sizes), [0] * len(self._sizes)
        at = 0
        for position in positions:
            # An address of 0 means no gradient; the address of an empty gradient is never read.
            addresses[position] = (
                flat.ctypes.data + 4 * at if self._sizes[position] else self.pull.sent[0].ctypes.data
            )
            strides[position] = self.inputs[position].table.dim
            at += self._sizes[position]
        sums = self.pull.plan.reduce(addresses, strides)
        return self.pull.pack(sums, self._engine.scale, complete)
