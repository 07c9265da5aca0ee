"""`RemoteStore`: the rows are with parameter servers, each of which owns a range of the key hashes.

A lookup groups the batch by key, sorts the distinct keys by server (`Route`) and sends each server its share;
gradients, summed by key, return the same way without their keys, because a server remembers what it was
asked. Lookups run ahead of the computation and gradients return in the background, as far as the bound on
staleness allows (`Window`); with a bound of 1 a lookup begins when the gradients of the batch before have
been applied, and results are those of a store in memory, bit for bit.

Of what concerns rows and not batches (statistics, snapshots, evictions), each of W trainers speaks for the
servers r, r + W, …, so that all trainers together have each server once.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from karvan import _native, buffers, ranks
from karvan.store import incomplete
from karvan.store.capture import Capture
from karvan.store.messages import cut, floats, words
from karvan.store.owners import hashes_of, owners_of
from karvan.store.protocol import (
    AwayStore,
    Counts,
    Found,
    Keys,
    Plan,
    Prepared,
    Program,
    Push,
    Rows,
    Rule,
    TableSpec,
)
from karvan.store.window import Window
from karvan.store.wording import from_wire, rule_to_json, spec_to_json, to_wire
from karvan.wire import Message, Reply

_ROWS_AT_ONCE = 1 << 18  # of a load


class Pull:
    """A batch whose keys are to be looked up, or are."""

    def __init__(
        self,
        store: RemoteStore,
        program: Program,
        plan: _native.Plan,
        *,
        training: bool,
        step: int,
        now: float,
    ) -> None:
        self._store = store
        self.program = program
        self.plan = plan
        self.training = training
        self.step = step
        self.now = now
        self.number = 0  # of a training lookup that has begun
        self.begun = False
        self.offered = False  # to begin when there is room
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

    def begin(self, number: int) -> None:
        """Send the keys; training lookups are numbered from 1, others are not."""
        self.number = number
        self.begun = True
        self.replies = self._store.send_pull(self)

    def fits(self, training: bool, step: int, now: float) -> bool:
        """Whether it is, or can be made, the lookup that a forward needs."""
        if not self.begun and not self.offered:
            self.training, self.step, self.now = training, step, now
        return self.training == training and (self.step == step or not training)

    def finish(self) -> None:
        """Wait for the vectors, and pool them."""
        sizes = floats(self.wanted, self.dims)
        vectors = buffers.empty(sum(sizes))
        flat, at = vectors.numpy(), 0
        for reply, size in zip(self.replies, sizes, strict=True):
            received = from_wire(reply.wait().arrays[0], self._store.wire)
            np.copyto(flat[at : at + size], received)
            at += size
        self.route.pool(vectors.data_ptr())

    def __del__(self) -> None:
        if self.number:
            self._store.forget(self.number)


class Own:
    """Gradients that are still here. What `finite` and `touched` say holds for all trainers that wait for each other."""

    def __init__(
        self, native: _native.Gradients, finite: list[bool], touched: list[bool], complete: bool
    ) -> None:
        self.native = native
        self.complete = complete
        self._finite = finite
        self._touched = touched

    def finite(self) -> list[bool]:
        """See `Gradients.finite`."""
        return self._finite

    def touched(self) -> list[bool]:
        """See `Gradients.touched`."""
        return self._touched


class RemoteStore(AwayStore):
    """Tables that are spread over parameter servers."""

    def __init__(self, connection: ranks.Connection) -> None:
        assert connection.servers is not None
        self._connection = connection
        self._servers = connection.servers
        self._store = self._servers.new_store()
        self.count = len(self._servers)
        self.wire = connection.settings.wire
        self._staleness = connection.settings.staleness
        self.window = Window(self._staleness)
        self._dims: dict[str, int] = {}
        self._done: deque[int] = deque()  # lookups whose plans servers need not keep
        self._mine = range(connection.rank, self.count, connection.world)
        self.keys_asked = 0  # distinct keys of batches so far

    def dim(self, table: str) -> int:
        """The floats of a vector."""
        return self._dims[table]

    @property
    def share(self) -> tuple[int, int]:
        """See `Store.share`; of what passes through this process."""
        return self._connection.rank, self._connection.world

    @property
    def synchronous(self) -> bool:
        """Whether a lookup waits for the gradients of the batch before, of all trainers."""
        return self._staleness == 1

    # Batches.

    def prepare(
        self,
        program: Program,
        inputs: list[int],
        *,
        training: bool | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> Prepared:
        """See `Store.prepare`: a lookup whose purpose is known begins as soon as staleness allows."""
        plan = _native.prepare(program.native, inputs)
        pull = Pull(self, program, plan, training=bool(training), step=step, now=now)
        if training is not None and not self.synchronous:
            if training:
                pull.offered = True
                self.window.offer(pull)
            else:
                pull.begin(0)
        return pull

    def forward(
        self, program: Program, inputs: list[int] | Prepared, *, training: bool, step: int, now: float
    ) -> Plan:
        """See `Store.forward`."""
        self.window.check()
        if isinstance(inputs, Pull):
            pull = inputs
            if not pull.fits(training, step, now):
                pull = Pull(self, program, inputs.plan, training=training, step=step, now=now)
        else:
            plan = _native.Plan(program.native, inputs)
            pull = Pull(self, program, plan, training=training, step=step, now=now)
        if training:
            self.window.need(pull)
        elif not pull.begun:
            pull.begin(0)
        pull.finish()
        return Plan(pull.plan, {}, pull)

    def send_pull(self, pull: Pull) -> list[Reply]:
        """Ask the servers; for `Pull`."""
        head = {
            "store": self._store,
            "batch": pull.number,
            "tables": pull.program.tables,
            "training": pull.training,
            "step": pull.step,
            "now": pull.now,
            "wire": self.wire,
            "done": self._take_done(),
        }
        self.keys_asked += pull.route.keys
        return [
            self._servers.peer(server).begin(
                "pull", {**head, "counts": pull.wanted[server]}, [pull.sent[server]]
            )
            for server in range(self.count)
        ]

    def reduce(self, plan: Plan, addresses: Sequence[int], strides: Sequence[int]) -> Own:
        """See `Store.reduce`; trainers that wait for each other agree on what is finite."""
        mine = plan.native.reduce(list(addresses), list(strides))
        complete = plan.away.route.complete(mine)
        finite, touched = mine.finite(), mine.touched()
        if self.synchronous and self._connection.world > 1:
            flags = [*touched, *(not good for good in finite), not complete]
            agreed = (self._connection.here.sum(torch.tensor(flags, dtype=torch.float32)) > 0).tolist()
            slots = len(touched)
            touched, finite = agreed[:slots], [not bad for bad in agreed[slots:-1]]
            complete = not agreed[-1]
        return Own(mine, finite, touched, complete)

    def update(
        self,
        program: Program,
        gradients: Sequence[tuple[Plan, Own]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """See `Store.update`: gradients go to the servers in the background."""
        self.window.check()
        finite = [all(bits) for bits in zip(*(own.finite() for _, own in gradients), strict=True)]
        kept: dict[str, Any] = {}
        skipped = []
        for table, good in zip(program.tables, finite, strict=True):
            if table in rules and good:
                kept[table] = rule_to_json(rules[table])
            elif table in rules:
                skipped.append(table)
        pulls: list[Pull] = [plan.away for plan, _ in gradients]
        numbers = [pull.number for pull in pulls]
        complete = all(own.complete for _, own in gradients)
        packed = [self._packed(pull, own, complete) for pull, (_, own) in zip(pulls, gradients, strict=True)]
        head = {
            "store": self._store,
            "batches": numbers,
            "rules": kept,
            "steps": {table: steps[table] for table in kept},
            "skipped": skipped,
            "complete": complete,
            "wire": self.wire,
            "done": self._take_done(),
        }
        pending = _Acknowledged(self.count, numbers, self.window)
        self.window.sent(numbers)
        for server in range(self.count):
            arrays = [to_wire(pieces[server], self.wire) for pieces in packed]
            self._servers.peer(server).begin("push", head, arrays, then=pending.one)

    def forget(self, number: int) -> None:
        """A lookup whose gradients have been sent, or will not be."""
        self._done.append(number)
        self.window.give_up(number)

    def _packed(self, pull: Pull, own: Own, complete: bool) -> tuple[torch.Tensor, ...]:
        sizes = floats(pull.wanted, pull.dims)
        sent = buffers.empty(sum(sizes))
        world, by_key = self._connection.world, self._connection.settings.grad_reduce == "key"
        scale = 1.0 if by_key else 1.0 / world
        if complete:
            pull.route.pack_gradients(own.native, scale, sent.data_ptr())
        else:
            incomplete.pack(pull.sent, pull.wanted, pull.dims, own.native, scale, sent)
        return torch.split(sent, sizes)

    def _take_done(self) -> list[int]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    # Rows.

    def _ask(self, method: str, head: Mapping[str, Any]) -> list[Message]:
        """The answers of the servers that this trainer speaks for, after its gradients."""
        self.window.drain()
        return self._servers.call(method, {"store": self._store, **head}, of=self._mine)

    def lookup(
        self, keys: Mapping[str, tuple[Keys, Counts]], *, training: bool, step: int, now: float
    ) -> dict[str, Found]:
        """See `Store.lookup`."""
        self.window.drain()
        owners = {table: owners_of(hashes_of(unique), self.count) for table, (unique, _) in keys.items()}
        head = {"tables": list(keys), "training": training, "step": step, "now": now}
        replies = []
        for server in range(self.count):
            arrays: list[NDArray[Any]] = []
            for table, (unique, counts) in keys.items():
                mine = owners[table] == server
                arrays += [unique[mine], counts[mine]]
            replies.append(self._servers.peer(server, "ask").begin("lookup", head, arrays))
        answers = [reply.wait() for reply in replies]
        made = {}
        for number, (table, (unique, _)) in enumerate(keys.items()):
            vectors = np.empty((len(unique), self._dims[table]), np.float32)
            for server, answer in enumerate(answers):
                vectors[owners[table] == server] = answer.arrays[number]
            made[table] = Found(vectors, 0)
        return made

    def apply(
        self,
        pushes: Mapping[str, Sequence[Push]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """See `Store.apply`; gradients of rows that left are of no harm: they are not inserted."""
        self.window.drain()
        head = {
            "rules": {table: rule_to_json(rules[table]) for table in pushes},
            "steps": {table: steps[table] for table in pushes},
            "numbers": {table: len(listed) for table, listed in pushes.items()},
        }
        replies = []
        for server in range(self.count):
            arrays: list[NDArray[Any]] = []
            for listed in pushes.values():
                for push in listed:
                    mine = owners_of(hashes_of(push.keys), self.count) == server
                    arrays += [push.keys[mine], push.gradients[mine]]
            replies.append(self._servers.peer(server, "ask").begin("apply", head, arrays))
        for reply in replies:
            reply.wait()

    def add_table(self, spec: TableSpec) -> None:
        """See `Store.add_table`; each server holds an equal share of the rows that a policy allows."""
        self._servers.call("add_table", {"spec": spec_to_json(spec)}, line="train")
        self._dims[spec.name] = spec.dim

    def set_state(self, table: str, initial: Sequence[float], fresh: bool) -> None:
        """See `Store.set_state`."""
        self.window.drain()
        self._servers.call(
            "set_state", {"table": table, "initial": list(initial), "fresh": fresh}, line="train"
        )

    def skip(self, table: str) -> None:
        """See `Store.skip`."""
        self._ask("skip", {"table": table})

    def evict(self, table: str, *, step: int, now: float) -> int:
        """See `Store.evict`."""
        return sum(a.head["rows"] for a in self._ask("evict", {"table": table, "step": step, "now": now}))

    def erase(self, table: str, keys: Keys) -> int:
        """See `Store.erase`."""
        self.window.drain()
        owners = owners_of(hashes_of(keys), self.count)
        replies = [
            self._servers.peer(server, "ask").begin("erase", {"table": table}, [keys[owners == server]])
            for server in self._mine
        ]
        return sum(reply.wait().head["rows"] for reply in replies)

    def clear(self, table: str) -> None:
        """See `Store.clear`."""
        self._ask("clear", {"table": table})

    def version(self, table: str) -> int:
        """See `Store.version`."""
        return sum(answer.head["version"] for answer in self._ask("version", {"table": table}))

    def evicted_since(self, table: str, version: int) -> Keys:
        """See `Store.evicted_since`; servers count their versions themselves, so only 0 can be asked for."""
        if version != 0:
            raise ValueError(
                f"Table '{table}' of remote servers tells keys that left since 0, got {version}."
            )
        answers = self._ask("evicted_since", {"table": table, "version": 0})
        return np.concatenate([np.empty(0, np.int64), *(answer.arrays[0] for answer in answers)])

    def snapshot(self, table: str, part: int = 0, parts: int = 1) -> Rows:
        """See `Store.snapshot`."""
        answers = self._ask("snapshot", {"table": table, "part": part, "parts": parts})
        columns = zip(*(answer.arrays for answer in answers), strict=True)
        joined = [np.concatenate(column) for column in columns]
        return Rows._make(joined) if joined else self._no_rows(table)

    def _no_rows(self, table: str) -> Rows:
        none = np.empty(0, np.uint32)
        return Rows(
            np.empty(0, np.int64),
            np.empty((0, self._dims[table]), np.float32),
            np.empty((0, 0), np.float32),
            none,
            none,
        )

    def load(self, table: str, rows: Rows) -> None:
        """See `Store.load`; of W trainers each loads the rows of its share of the hashes."""
        self.window.drain()
        hashes = hashes_of(rows.keys)
        mine = owners_of(hashes, self._connection.world) == self._connection.rank
        owners = owners_of(hashes, self.count)
        replies = []
        for server in range(self.count):
            places = np.flatnonzero(mine & (owners == server))
            for begin in range(0, len(places), _ROWS_AT_ONCE):
                chosen = places[begin : begin + _ROWS_AT_ONCE]
                arrays = [np.ascontiguousarray(column[chosen]) for column in rows]
                replies.append(self._servers.peer(server, "ask").begin("load", {"table": table}, arrays))
        for reply in replies:
            reply.wait()

    def extra(self, table: str) -> dict[str, NDArray[Any]]:
        """See `Store.extra`: servers save theirs themselves."""
        return {}

    def load_extra(self, table: str, extra: Mapping[str, NDArray[Any]]) -> None:
        """See `Store.load_extra`: nothing, as `extra` gives nothing."""

    def stats(self, table: str) -> dict[str, int]:
        """See `Store.stats`; of the servers that this trainer speaks for."""
        told = [a.head["stats"] for a in self._servers.call("stats", {"table": table}, of=self._mine)]
        names = (
            "rows",
            "bytes",
            "inserted",
            "evicted",
            "rejected",
            "dropped_gradients",
            "skipped_updates",
            "moved",
        )
        return {name: sum(each[name] for each in told) for name in names}

    # Checkpoints.

    def capture(
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
    ) -> Capture:
        """See `Store.capture`; a collective of all trainers. The servers hold it and write it down."""
        self.window.drain()
        lane = self._connection.here
        lane.barrier()  # gradients of all trainers are there
        told: dict[str, Any] = {}
        if lane.rank == 0:
            number = secrets.randbits(52)
            head = {"capture": number, "tables": list(tables), "parts": dict(parts), "track": track}
            before = None if since is None else max(since.values(), default=0)
            try:
                self._servers.call("capture", {**head, "since": before})
                told["number"] = number
            except Exception as error:  # to be raised on all
                told["error"] = [type(error).__name__, str(error)]
        told = lane.gather_json(told)[0]
        if "error" in told:
            kind, text = told["error"]
            raise ValueError(text) if kind == "ValueError" else RuntimeError(text)
        return _Captured(self, tables, told["number"])

    def save_away(
        self,
        capture: Capture,
        folder: str,
        tables: Mapping[str, Mapping[str, Any]],
        waiting: Callable[[], None],
    ) -> list[dict[str, Any]]:
        """See `AwayStore.save_away`."""
        assert isinstance(capture, _Captured)
        head = {
            "capture": capture.number,
            "folder": folder,
            "tables": {n: dict(t) for n, t in tables.items()},
        }
        replies = [
            self._servers.peer(server, "save").begin("save", head, deadline=_SAVING)
            for server in range(self.count)
        ]
        while not all(reply.done for reply in replies):
            waiting()
            replies[0].pause(0.05)
        return [reply.wait().head["shares"] for reply in replies]

    def fill_away(self, path: str, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """See `AwayStore.fill_away`."""
        self.window.drain()
        head = {"path": path, "tables": {name: dict(told) for name, told in tables.items()}}
        replies = [
            self._servers.peer(server, "save").begin("fill", head, deadline=_SAVING)
            for server in range(self.count)
        ]
        for reply in replies:
            reply.wait()

    def close_capture(self, number: int) -> None:
        """For a capture that is not needed any more."""
        if self._connection.rank == 0:
            for server in range(self.count):
                self._servers.peer(server, "save").begin("close_capture", {"capture": number})


_SAVING = 24 * 3600.0  # seconds for what depends on the size of tables; signs of life come meanwhile


class _Captured(Capture):
    """What servers hold of one moment. They write it; nobody reads it here."""

    def __init__(self, store: RemoteStore, tables: Sequence[str], number: int) -> None:
        self._store = store
        self.number = number
        self.versions = dict.fromkeys(tables, number)
        self._open = True

    def part(self, table: str, part: int) -> Rows:
        """See `Capture.part`."""
        raise TypeError("Servers write what was captured; see AwayStore.save_away.")

    def erased(self, table: str) -> Keys:
        """See `Capture.erased`."""
        raise TypeError("Servers write what was captured; see AwayStore.save_away.")

    def close(self) -> None:
        """See `Capture.close`."""
        if self._open:
            self._open = False
            self._store.close_capture(self.number)


class _Acknowledged:
    """Waits, without a thread, until all servers have applied some batches' gradients."""

    def __init__(self, servers: int, numbers: list[int], window: Window) -> None:
        self._left = servers
        self._numbers = numbers
        self._window = window
        self._lock = threading.Lock()

    def one(self, reply: Reply) -> None:
        """A server has answered."""
        if reply.error is not None:
            self._window.fail(reply.error)
            return
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._window.end(self._numbers)
