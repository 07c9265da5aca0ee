"""The tables of a parameter server, and the calls about them outside of training steps.

Calls have been checked against their declarations (`karvan/protocol/parameter_server.py`). What depends on
the tables is checked here, before native code sees an array: that a table exists, how long its vectors are,
how much optimizer state a row can have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from karvan.protocol import parameter_server as protocol
from karvan.store import LookupContext, MemoryStore, Push, Rows, TableSpec
from karvan.store.memory import MemoryTable
from karvan.store.messages import rule_from_json, spec_from_json
from karvan.system_limits import available_memory
from karvan.wire import Endpoint, Message, RefusedError, Request
from karvan.wire.schema import Call, expect_array

_log = logging.getLogger("karvan.cluster")
T = TypeVar("T", bound=protocol.OfTable)

_ROW_UNIT, _INDEX = 16, 30  # bytes to which a row is rounded up; bytes of a row in the index


class ServerTables:
    """The tables of server number `index` of `count`, which have up to `capacity` rows together."""

    def __init__(self, index: int, count: int, capacity: int | None = None) -> None:
        self._index = index
        self._count = count
        self._capacity = capacity
        self._row_bytes: dict[str, int] = {}
        self._warned = False
        self._adding = threading.Lock()
        self.store = MemoryStore(capacity=capacity)
        self.specs: dict[str, TableSpec] = {}
        self._checked_kinds: dict[str, set[str]] = {}  # of rules that fit the state that rows have
        self.endpoints: list[Endpoint[Any]] = [
            Endpoint(protocol.ADD_TABLE, self._add_table),
            Endpoint(protocol.SET_STATE, self._set_state),
            Endpoint(protocol.LOOKUP, self._lookup),
            Endpoint(protocol.APPLY, self._apply),
            self._about(protocol.SKIP, lambda table, call: table.skip()),
            self._about(
                protocol.EVICT,
                lambda table, call: {"rows": table.evict(step=call.head.step, now=call.head.now)},
            ),
            self._about(protocol.ERASE, lambda table, call: {"rows": table.erase(call.arrays[0])}),
            self._about(protocol.CLEAR, lambda table, call: table.clear()),
            self._about(protocol.VERSION, lambda table, call: {"version": table.version}),
            Endpoint(protocol.EVICTED_SINCE, self._evicted_since),
            Endpoint(protocol.SNAPSHOT, self._snapshot),
            Endpoint(protocol.LOAD, self._load),
            Endpoint(protocol.STATS, self._stats),
        ]

    def spec(self, table: str) -> TableSpec:
        """The spec of a table; a RefusedError if there is none of that name."""
        spec = self.specs.get(table)
        if spec is None:
            names = ", ".join(sorted(self.specs)[:8]) or "none"
            raise RefusedError(f"expected one of the tables here ({names}), got '{table}'.")
        return spec

    def check_tables(self, tables: Sequence[str]) -> None:
        """All of them must exist."""
        for table in tables:
            self.spec(table)

    def add(self, fields: Mapping[str, Any]) -> TableSpec:
        """Add the table of a spec, unless it exists."""
        spec = spec_from_json(fields).share(self._index, self._count)
        with self._adding:  # otherwise two calls could make two tables of one name, with different dims
            self.store.add_table(spec)
            self.specs[spec.name] = spec
        return spec

    def check_state(self, table: str, initial: Sequence[float]) -> None:
        """An optimizer has no state, one number for a row, or one to three for each number of its vector."""
        dim = self.spec(table).dim
        sizes = sorted({0, 1, dim, 2 * dim, 3 * dim})
        if len(initial) not in sizes:
            raise RefusedError(
                f"expected {', '.join(map(str, sizes))} floats of optimizer state for table '{table}', "
                f"got {len(initial)}."
            )

    def check_rules(self, rules: Mapping[str, Mapping[str, Any]]) -> None:
        """A ValueError unless the rows of these tables have the state that their rules need."""
        for table, rule in rules.items():
            if rule["kind"] in self._checked_kinds.get(table, ()):
                continue
            none = np.empty(0, np.int64), np.empty((0, self.spec(table).dim), np.float32)
            nothing = Push(
                *none, self.store.table(table).version
            )  # of now, so that no eviction is looked through
            self.store.apply({table: [nothing]}, {table: rule_from_json(rule)}, {table: 0})
            self._checked_kinds.setdefault(table, set()).add(rule["kind"])

    def set_state(self, table: str, initial: Sequence[float], fresh: bool) -> None:
        """Set the optimizer state that new rows of a table get."""
        self.check_state(table, initial)
        self.store.table(table).set_state(initial, fresh)
        self._checked_kinds.pop(table, None)
        self._forecast(table, len(initial))

    def _forecast(self, table: str, state: int) -> None:
        """Warn if the rows that limits allow do not fit into memory, before they are there."""
        spec = self.specs[table]
        vector = spec.dim * (4 if spec.dtype == "float32" else 2)
        self._row_bytes[table] = -(-(vector + 4 * state) // _ROW_UNIT) * _ROW_UNIT + _INDEX
        if self._capacity is None:
            limits = {name: self.specs[name].most_rows for name in self._row_bytes}
            rows = sum(most or 0 for most in limits.values())
            needed = sum((most or 0) * self._row_bytes[name] for name, most in limits.items())
        else:
            rows, needed = self._capacity, self._capacity * max(self._row_bytes.values())
        available = available_memory()
        if needed > available and not self._warned:
            self._warned = True
            _log.warning(
                "Server %d may have %s rows, which take %s GiB, but %s GiB of memory are available. Lower "
                "the capacity of parameter servers or tables, or have more servers on other machines.",
                *(self._index, f"{rows:,}"),
                *(f"{size / 2**30:,.0f}" for size in (needed, available)),
            )

    def _add_table(self, request: Request[protocol.AddTable]) -> Message:
        self.add(request.head.spec)
        return Message({})

    def _set_state(self, request: Request[protocol.SetState]) -> Message:
        head = request.head
        self.set_state(head.table, head.initial, head.fresh)
        return Message({})

    def _lookup(self, request: Request[protocol.Lookup]) -> Message:
        head, arrays = request.head, request.arrays
        tables = head.tables
        self.check_tables(tables)
        keys = {table: (arrays[2 * at], arrays[2 * at + 1]) for at, table in enumerate(tables)}
        rows = self.store.lookup(keys, LookupContext(head.training, head.step, head.now))
        return Message({}, [rows[table].vectors for table in tables])

    def _apply(self, request: Request[protocol.Apply]) -> Message:
        head, arrays = request.head, iter(request.arrays)
        self.check_tables(list(head.numbers))
        pushes: dict[str, list[Push]] = {}
        for table, number in head.numbers.items():
            dim, version = self.spec(table).dim, self.store.table(table).version
            pushes[table] = []
            for _ in range(number):
                keys, gradients = next(arrays), next(arrays)
                expect_array(gradients, f"gradients of table '{table}'", "float32", len(keys), dim)
                pushes[table].append(Push(keys, gradients, version))
        rules = {table: rule_from_json(rule) for table, rule in head.rules.items()}
        self.store.apply(pushes, rules, head.steps)
        return Message({})

    def _stored(self, request: Request[T]) -> MemoryTable:
        return self.store.table(self.spec(request.head.table).name)

    def _about(
        self, call: Call[T, Any], work: Callable[[MemoryTable, Request[T]], dict[str, int] | None]
    ) -> Endpoint[Any]:
        """The endpoint of a call about one table; work returns the answer, if there is any."""
        return Endpoint(call, lambda request: Message(work(self._stored(request), request) or {}))

    def _evicted_since(self, request: Request[protocol.EvictedSince]) -> Message:
        return Message({}, [self._stored(request).evicted_since(request.head.version)])

    def _snapshot(self, request: Request[protocol.SnapshotHead]) -> Message:
        head = request.head
        return Message({}, list(self._stored(request).snapshot(head.part, head.parts)))

    def _load(self, request: Request[protocol.OfTable]) -> Message:
        table, rows = self._stored(request), Rows(*request.arrays)
        expect_array(
            rows.vectors, f"vectors of table '{table.name}'", "float32", len(rows.keys), table.spec.dim
        )
        table.load(rows)  # which checks how much state a row has at that moment
        return Message({})

    def _stats(self, request: Request[protocol.OfTables]) -> Message:
        tables = request.head.tables
        self.check_tables(tables)
        return Message({"stats": {table: self.store.table(table).stats() for table in tables}})
