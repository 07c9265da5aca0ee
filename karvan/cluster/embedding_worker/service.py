"""The embedding worker: holds the id features of batches, and embeds them for trainers.

A loader sends ids under a name (`put`), and sends the name to a trainer (`IdsReference`). The trainer claims
the batch: the worker groups the ids by key, looks the keys up at the parameter servers on the trainer's
behalf, and answers with the outputs of all features. The gradients of these outputs come back under the same
name; the worker sums them by key, pushes the sums, and answers once all servers have applied them.

A worker holds nothing that cannot be sent again. One that replaces a dead worker knows neither engines nor
ids: it asks for them (`needs`), and repeats what the dead one may have done already. This is harmless,
because the trainer numbers its lookups and pushes, and servers do each number once.

In an elastic run a trainer is a member, whose number no other one has. A worker looks up and pushes in its
name, so servers stage what it pushes, and refuse it once the member is fenced off. Trainers commit at the
servers themselves, and have heard that a commit arrived before they claim the next batch. What a worker has
of a member that is gone, its session and the ids it has claimed, is dropped when others say so (`abandon`),
or when the member has been silent for as long as an unclaimed batch is kept.

A parameter server that has restarted, and may restore its saved rows, is asked to do so by whoever connects
to it first; workers report the restart to their trainers.

| variable | meaning | default |
|---|---|---|
| KARVAN_EMBEDDING_WORKER_EXPIRE | seconds after which a batch that nobody has claimed is dropped | 1000 |
| KARVAN_EMBEDDING_WORKER_BATCHES | batches that may wait to be claimed; loaders wait then | 1000 |
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from karvan.clock import clock
from karvan.cluster.batch_messages import unpack
from karvan.cluster.role_process import Generations, RoleSettings, RunService, generations_of
from karvan.distributed.parameter_servers import Servers, find_servers
from karvan.embedding.feature_inputs import FeatureInput, Inputs, absent_ids, features_from_json, make_program
from karvan.native import _native
from karvan.protocol import embedding_worker as protocol
from karvan.protocol.parameter_server import PUSH, expect_trainer
from karvan.protocol.values import DeclaredTable
from karvan.ragged import Batch, Ragged
from karvan.store.messages import from_wire, to_wire
from karvan.store.remote.servers import ServerLookup, begin_pull
from karvan.store.remote.workers import pack_layouts
from karvan.store.types import LookupContext
from karvan.wire import Array, Caller, Endpoint, Message, RefusedError, Request, Service, endpoints
from karvan.wire.schema import H

# Embeds batches on behalf of a trainer, with the trainer's own code.
#
# A `TrainerSession` acts for one trainer and has its engines, each an `Embedding`; one of its batches is an
# `Embedded`.


class TrainerSession:
    """Calls the parameter servers on behalf of one trainer."""

    def __init__(self, servers: Servers, hello: protocol.WorkerHello) -> None:
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

    @contextmanager
    def call(self) -> Iterator[None]:
        """While a call of the trainer is executed."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
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
        self.session = session
        self.count = len(session.servers)
        self.wire = wire
        self.features = features_from_json(features)
        self.program = make_program(self.features)
        dims = {feature.table: feature.dim for feature in self.program.features}
        self.dims = [dims[table] for table in self.program.tables]

    def push(self, head: protocol.PushPasses, sums: Sequence[tuple[Tensor, ...]]) -> None:
        """Send sums by key, by pass and server, and wait until they have been applied, or staged.

        Servers that have restarted since the lookup do not apply them; they count the updates they contain.
        """
        names = ("store", "sequence", "batches", "mine", "rules", "steps", "skipped", "complete", "wire")
        step = {} if head.step is None else {"step": head.step}  # of an elastic run, whose servers stage it
        request = {
            **{name: getattr(head, name) for name in names},
            **step,
            "done": self.session.take_done(head.store),
        }
        replies = []
        for server in range(self.count):
            arrays = [to_wire(pieces[server], self.wire) for pieces in sums]
            # Not queued behind lookups: they wait for those of other trainers, which may wait for this push.
            replies.append(self.session.servers.peer(server, "push").begin(PUSH, request, arrays))
        for reply in replies:
            reply.wait()


class Embedded:
    """A batch between its lookup and its gradients."""

    def __init__(self, engine: Embedding, ids: Mapping[str, Any], store: int, context: LookupContext) -> None:
        self._engine = engine
        session = engine.session
        inputs: list[FeatureInput] = []
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
            inputs.append(input_)
        self.inputs = Inputs(inputs)
        plan = _native.prepare(engine.program.native, [input_.arrays() for input_ in inputs])
        self._sizes = [input_.out.numel() for input_ in inputs if input_.out is not None]
        self.pull = ServerLookup(
            engine.program,
            plan,
            context,
            servers=engine.count,
            dims=engine.dims,
            wire=engine.wire,
            send=lambda lookup: begin_pull(
                session.servers, lookup, store=store, done=session.take_done(store)
            ),
        )

    def finish(self) -> tuple[Tensor, ...]:
        """The outputs of all features, once the servers have answered."""
        self.pull.finish()
        return self.inputs.take_out()

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
            strides[position] = self.inputs.outputs[position].table.dim
            at += self._sizes[position]
        sums = self.pull.plan.reduce(addresses, strides)
        return self.pull.pack(sums, self._engine.session.scale, complete)


# The id features that an embedding worker holds, by the names that loaders gave them.


_REMEMBERED = 4096  # names of expired batches, to explain why they are missing


class _Claimed(NamedTuple):
    ids: Batch
    trainer: int


class IdCache:
    """Batches by name. One that nobody claims within `expire` seconds is dropped; up to `most` may wait."""

    def __init__(self, expire: float, most: int) -> None:
        if not expire > 0 or most < 1:
            raise ValueError(
                f"Expected expire above 0 and room for 1 batch or more, got {expire} and {most}."
            )
        self.expire = expire
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Batch, float]] = {}  # with the time of arrival, the oldest first
        self._claimed: dict[str, _Claimed] = {}
        self._requested: set[str] = set()  # claimed before they arrived
        self._dropped: deque[str] = deque(maxlen=_REMEMBERED)
        self.expired = 0
        self.received = 0

    @property
    def waiting(self) -> int:
        """Batches that nobody has claimed."""
        with self._lock:
            self._drop_old()
            return len(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._claimed)

    def put(self, name: str, ids: Batch) -> bool:
        """Store a batch, replacing one of that name; False if there is no room now."""
        with self._lock:
            self._drop_old()
            if name in self._claimed:
                self._claimed[name] = self._claimed[name]._replace(ids=ids)
            elif name in self._waiting:
                self._waiting[name] = ids, self._waiting[name][1]
            elif len(self._waiting) >= self._most and name not in self._requested:
                return False
            else:
                self._requested.discard(name)
                self._waiting[name] = ids, clock.now()
                self.received += 1
            return True

    def claim(self, name: str, trainer: int = 0) -> Batch | None:
        """The batch, which stays until `forget`; None if it is not here."""
        with self._lock:
            self._drop_old()
            batch = self._waiting.pop(name, None) or self._claimed.get(name)
            if batch is None:
                self._requested.add(name)
                return None
            self._claimed[name] = _Claimed(batch[0], trainer)
            return batch[0]

    def why_missing(self, name: str) -> str:
        """The reason, for an error message."""
        with self._lock:
            if name in self._dropped:
                return f"nobody claimed it within {self.expire:g} s, so it was dropped"
        return "it never arrived, or was dropped"

    def forget(self, names: Iterable[str]) -> None:
        """Drop batches that nobody needs any more."""
        with self._lock:
            for name in names:
                self._requested.discard(name)
                self._waiting.pop(name, None)
                self._claimed.pop(name, None)

    def forget_claimed(self, trainer: int | None = None) -> None:
        """Drop the batches that a trainer has claimed, which is gone; None: those of all trainers."""
        with self._lock:
            if trainer is None:
                self._claimed.clear()
                self._requested.clear()
            else:
                mine = [name for name, batch in self._claimed.items() if batch.trainer == trainer]
                for name in mine:
                    del self._claimed[name]

    def _drop_old(self) -> None:
        before = clock.now() - self.expire
        old = list(itertools.takewhile(lambda name: self._waiting[name][1] <= before, self._waiting))
        for name in old:
            del self._waiting[name]
        self._dropped.extend(old)
        self.expired += len(old)


_SERVER_WITHIN = 300.0  # seconds for a call of a parameter server


class EmbeddingWorker(RunService):
    """Worker number `index`; expire and most: see `IdCache`."""

    hello = protocol.WORKER_HELLO

    def __init__(
        self,
        index: int = 0,
        *,
        expire: float = 1000.0,
        most: int = 1000,
        generations: Generations | None = None,
    ) -> None:
        super().__init__(generations)
        self.name = f"embedding worker {index}"
        self._index = index
        self._ids = IdCache(expire, most)
        self._sessions: dict[int, TrainerSession] = {}  # by trainer
        self.claims = 0
        self.backwards = 0
        self.endpoints = endpoints(
            protocol.WORKER_CALLS,
            Endpoint(protocol.PUT, self._put),
            Endpoint(protocol.FORGET, lambda call: self._ids.forget(call.head.references)),
            Endpoint(protocol.ABANDON_MEMBERS, self._abandon),
            Endpoint(protocol.DESCRIBE_WORKER, self._describe),
            Endpoint(protocol.ENGINE, self._engine),
            Endpoint(protocol.CLAIM, self._in_session(self._embed)),
            Endpoint(protocol.BACKWARD, self._in_session(self._push)),
        )

    @override
    def welcome(self, caller: Caller) -> dict[str, Any]:
        """A trainer says what it would say to a parameter server, a loader nothing."""
        hello: protocol.WorkerHello | protocol.IdSenderHello = caller.hello
        if isinstance(hello, protocol.IdSenderHello):
            return {"worker": self._index}
        if hello.worker != self._index:
            raise RefusedError(f"expected to be asked for as worker {self._index}, got {hello.worker}.")
        expect_trainer(hello)
        self._enter(hello)
        return {"worker": self._index}

    @override
    def _begin_run(self, hello: protocol.WorkerHello) -> None:
        self._leave()

    @override
    def _admit(self, hello: protocol.WorkerHello) -> None:
        self._open(hello)

    def _open(self, hello: protocol.WorkerHello) -> TrainerSession:
        """The session of a trainer; one that was dropped is opened again."""
        trainer = hello.trainer
        if trainer not in self._sessions:
            self._sessions[trainer] = TrainerSession(_servers_for(hello), hello)
        return self._sessions[trainer]

    def _leave(self) -> None:
        """Forget the trainers of a run that is over."""
        self._drop(list(self._sessions))
        self._ids.forget_claimed()

    def _drop(self, trainers: Iterable[int]) -> None:
        """Forget some trainers; if one calls after all, it sends what this worker needs to know again."""
        for trainer in trainers:
            session = self._sessions.pop(trainer, None)
            self._ids.forget_claimed(trainer)
            if session is not None:  # in the background, as closing may take a while
                threading.Thread(target=session.close, name="karvan-leave", daemon=True).start()

    @contextmanager
    def _session(self, caller: Caller) -> Iterator[TrainerSession]:
        """The session of a trainer, while its call is executed."""
        with ExitStack() as calls:
            with self._lock:
                hello: protocol.WorkerHello | protocol.IdSenderHello = caller.hello
                if isinstance(hello, protocol.IdSenderHello) or hello.run != self._run:
                    raise RefusedError("expected a trainer of the job's newest run, got another caller.")
                session = self._open(hello)
                calls.enter_context(session.call())
                if hello.elastic:
                    self._drop(
                        [name for name, its in self._sessions.items() if its.silence > self._ids.expire]
                    )
            yield session

    def _in_session(
        self, work: Callable[[TrainerSession, Request[H]], Message]
    ) -> Callable[[Request[H]], Message]:
        """The method of a trainer's call."""

        def execute(call: Request[H]) -> Message:
            with self._session(call.caller) as session:
                return work(session, call)

        return execute

    def _abandon(self, call: Request[protocol.GoneMembers]) -> None:
        """Members of an elastic run are gone; a trainer of the same run says so."""
        with self._session(call.caller), self._lock:
            self._drop(call.head.members)

    def _put(self, call: Request[protocol.Put]) -> Message:
        ids = unpack(call.head.batch, call.arrays)
        for feature, entry in ids.items():
            values = entry.values if isinstance(entry, Ragged) else entry
            if not isinstance(values, torch.Tensor) or values.dtype not in (torch.int64, torch.uint64):
                raise RefusedError(f"expected ids of 64 bits for '{feature}', got another type.")
            if isinstance(entry, Ragged):
                entry.validate()
                if values.dim() != 1:
                    raise RefusedError(f"expected ids of one dimension for '{feature}', got {values.dim()}.")
                if entry.weights is not None and not entry.weights.is_floating_point():
                    raise RefusedError(
                        f"expected weights that are floats for '{feature}', got {entry.weights.dtype}."
                    )
        return Message({"kept": self._ids.put(call.head.reference, ids)})

    def _engine(self, call: Request[protocol.EngineHead]) -> None:
        head = call.head
        with self._session(call.caller) as session:
            engine = Embedding(session, head.features, head.wire)
            session.declare(head.tables, head.declarations)
            session.engines[head.engine] = engine

    def _embed(self, session: TrainerSession, call: Request[protocol.Claim]) -> Message:
        """The outputs of a batch, for its trainer."""
        head = call.head
        session.forget(head.store, head.done)
        self._ids.forget(head.gone)
        engine = _engine_of(head, session)
        if engine is None:
            return _needs_engine()
        ids = self._ids.claim(head.reference, call.caller.hello.trainer)
        if ids is None:
            return self._needs_ids(head.reference)
        context = LookupContext(head.training, head.step, head.now)
        embedded = Embedded(engine, ids, head.store, context)
        embedded.pull.begin(head.batch)
        outs = embedded.finish()
        if head.training:
            session.add(head.store, head.batch, embedded)
        self.claims += 1
        layouts, arrays = pack_layouts([input_.layout for input_ in embedded.inputs.outputs])
        vectors = torch.cat([out.reshape(-1) for out in outs])
        answer = {"layouts": layouts, "restarted_servers": session.take_restarted()}
        return Message(answer, [to_wire(vectors, engine.wire), *arrays])

    def _push(self, session: TrainerSession, call: Request[protocol.PushPasses]) -> Message:
        """Send the gradients of a batch to the servers, and wait until they have them."""
        head = call.head
        engine = _engine_of(head, session)
        if engine is None:
            return _needs_engine()
        if head.wire != engine.wire:
            raise RefusedError(f"expected gradients as {engine.wire}, like its vectors, got {head.wire}.")
        passes: list[Embedded] = []
        for index, described in zip(head.mine, head.passes, strict=True):
            batch = head.batches[index]
            embedded = session.find(head.store, batch)
            if embedded is None:
                ids = self._ids.claim(described.reference, call.caller.hello.trainer)
                if ids is None:
                    return self._needs_ids(described.reference)
                embedded = Embedded(engine, ids, 0, LookupContext(True, 0, 0.0))  # only to group them by key
                session.add(head.store, batch, embedded)
            passes.append(embedded)
        sums = [
            embedded.sum(array, described.given, head.complete)
            for embedded, described, array in zip(passes, head.passes, call.arrays, strict=True)
        ]
        # Servers hear of it with this push: a worker may die after its answer.
        session.forget(head.store, head.done)
        self._ids.forget(head.gone)
        engine.push(head, sums)
        self.backwards += 1
        return Message({"restarted_servers": session.take_restarted()})

    def _needs_ids(self, name: str) -> Message:
        text = f"expected the ids of reference {name!r}, got a claim without: {self._ids.why_missing(name)}."
        return Message({"needs": "ids", "reference": name, "text": text})

    def _describe(self, call: Request) -> Message:
        """What it holds and has done, for monitoring and tests."""
        return Message(
            {
                "waiting": self._ids.waiting,
                "kept": len(self._ids),
                "received": self._ids.received,
                "expired": self._ids.expired,
                "claims": self.claims,
                "backwards": self.backwards,
                "plans": sum(len(session) for session in list(self._sessions.values())),
            }
        )

    @override
    def close(self) -> None:
        with self._lock:
            self._leave()


def _servers_for(hello: protocol.WorkerHello) -> Servers:
    """The parameter servers, connected as the trainer would connect to them."""
    settings = {name: value for name, value in hello.as_json().items() if name not in ("worker", "line")}
    try:
        servers = find_servers(None, settings, _SERVER_WITHIN, hello.reload)
    except (RuntimeError, ValueError) as error:
        raise RefusedError(f"expected parameter servers in the environment, got none: {error}") from error
    if len(servers) != hello.servers:
        raise RefusedError(
            f"expected a trainer with {len(servers)} parameter servers, got one with {hello.servers}."
        )
    return servers


def _engine_of(head: protocol.OfEngine, session: TrainerSession) -> Embedding | None:
    """The engine; None if the trainer has to send it or newer declarations of its tables first."""
    declared = session.declarations >= head.declarations
    return session.engines.get(head.engine) if declared else None


def _needs_engine() -> Message:
    return Message({"needs": "engine", "text": "expected to know the trainer's engine."})


def make(settings: RoleSettings) -> Service:
    """The worker of a process; see `karvan/cluster/role_process.py`."""
    job = settings.job
    return EmbeddingWorker(
        job.index,
        expire=1000.0 if job.embedding_worker_expire is None else job.embedding_worker_expire,
        most=1000 if job.embedding_worker_batches is None else job.embedding_worker_batches,
        generations=generations_of(settings),
    )
