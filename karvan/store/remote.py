"""`RemoteStore`: the rows are with parameter servers, each of which owns a range of the key hashes.

A lookup groups the batch by key, sorts the distinct keys by server (`Route`) and sends each server its share;
gradients, summed by key, return the same way without their keys, because a server remembers what it was
asked. Lookups run ahead of the computation and gradients return in the background, as far as the bound on
staleness allows (`Window`); with a bound of 1 a lookup begins when the gradients of the batch before have
been applied, and results are those of a store in memory, bit for bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from karvan import _native, buffers, ranks
from karvan.store import incomplete
from karvan.store.messages import floats
from karvan.store.protocol import Plan, Prepared, Program, Rule
from karvan.store.pull import Pull
from karvan.store.remote_tables import RemoteTables
from karvan.store.window import Window
from karvan.store.wording import rule_to_json, to_wire
from karvan.wire import Reply


class Own:
    """Gradients that are still here. What they say holds for all trainers that wait for each other."""

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


class RemoteStore(RemoteTables):
    """Tables that are spread over parameter servers."""

    def __init__(self, connection: ranks.Connection) -> None:
        super().__init__(connection)
        self._store = self._servers.new_store()
        self.wire = connection.settings.wire
        self._done: deque[int] = deque()  # lookups whose plans servers need not keep
        self.keys_asked = 0  # distinct keys of batches so far
        # Seconds from a call to its answer, of the last ones.
        self.seconds: dict[str, deque[float]] = {"pull": deque(maxlen=4096), "push": deque(maxlen=4096)}

    @property
    def looks_ahead(self) -> bool:
        """Whether lookups begin before their batch's turn, and so perhaps for batches that never have one."""
        return self._connection.settings.staleness > 1

    @property
    def together(self) -> bool:
        """Whether lookups and gradients of all trainers are done together."""
        return self._connection.settings.mode == "sync" and self._connection.world > 1

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
        if training is not None and self.looks_ahead:
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
        self.seconds["pull"] += [reply.seconds for reply in pull.replies]
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
        if self.together:
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
        pending = _Acknowledged(self.count, numbers, self.window, self.seconds["push"])
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
        settings = self._connection.settings
        # As many gradients as make a step, of rows as of dense parameters.
        together = settings.dense.together if settings.mode == "async" else self._connection.world
        scale = 1.0 if settings.grad_reduce == "key" else 1.0 / together
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


class _Acknowledged:
    """Waits, without a thread, until all servers have applied some batches' gradients."""

    def __init__(self, servers: int, numbers: list[int], window: Window, seconds: deque[float]) -> None:
        self._seconds = seconds
        self._left = servers
        self._numbers = numbers
        self._window = window
        self._lock = threading.Lock()

    def one(self, reply: Reply) -> None:
        """A server has answered."""
        if reply.error is not None:
            self._window.fail(reply.error)
            return
        self._seconds.append(reply.seconds)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._window.end(self._numbers)
