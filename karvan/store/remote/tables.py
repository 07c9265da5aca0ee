"""`RemoteTables`: calls to parameter servers about entire tables.

Of W trainers, trainer r asks the servers r, r + W, …, so that all trainers together ask each server once.
Every request waits for the gradients that are in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from karvan.distributed import Connection
from karvan.distributed.clients.parameter_servers import Servers
from karvan.store.exchange.key_sharding import hashes_of, owners_of
from karvan.store.exchange.wire_format import rule_to_json, spec_to_json
from karvan.store.remote.lookups_in_flight import LookupsInFlight
from karvan.store.types import Counts, Found, Keys, Push, Rows, Rule, TableSpec
from karvan.wire import Message
from karvan.wire.schema.calls import expect_array

_ROWS_AT_ONCE = 1 << 18  # of a load
_STATS = (
    *("rows", "bytes", "inserted", "evicted", "rejected", "dropped_gradients", "skipped_updates"),
    "moved",
)


class RemoteTables:
    """Tables that are spread over parameter servers; the methods are those of `Store`."""

    def __init__(self, connection: Connection, servers: Servers, lookups: LookupsInFlight) -> None:
        self._connection = connection
        self._servers = servers
        self._lookups = lookups
        self._count = len(servers)
        self._dims: dict[str, int] = {}

    @property
    def _mine(self) -> range:
        """The servers that this trainer asks."""
        return range(self._connection.rank, self._count, self._connection.world_size)

    def dim(self, table: str) -> int:
        """The floats of a vector."""
        return self._dims[table]

    def _ask(self, method: str, head: Mapping[str, Any]) -> list[Message]:
        """The answers of the servers that this trainer asks, once they have applied its gradients."""
        self._lookups.settle()
        return self._servers.call(method, head, of=self._mine)

    def lookup(
        self, keys: Mapping[str, tuple[Keys, Counts]], *, training: bool, step: int, now: float
    ) -> dict[str, Found]:
        """Look keys up on the servers that have them."""
        self._lookups.drain()
        owners = {table: owners_of(hashes_of(unique), self._count) for table, (unique, _) in keys.items()}
        head = {"tables": list(keys), "training": training, "step": step, "now": now}
        replies = []
        for server in range(self._count):
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
                mine = owners[table] == server
                shape = int(mine.sum()), self._dims[table]
                vectors[mine] = expect_array(answer.arrays[number], "vectors", "float32", *shape)
            made[table] = Found(vectors, 0)
        return made

    def apply(
        self,
        pushes: Mapping[str, Sequence[Push]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """Gradients of rows that were removed do no harm: they insert nothing."""
        self._lookups.drain()
        head = {
            "rules": {table: rule_to_json(rules[table]) for table in pushes},
            "steps": {table: steps[table] for table in pushes},
            "numbers": {table: len(listed) for table, listed in pushes.items()},
        }
        replies = []
        for server in range(self._count):
            arrays: list[NDArray[Any]] = []
            for listed in pushes.values():
                for push in listed:
                    mine = owners_of(hashes_of(push.keys), self._count) == server
                    arrays += [push.keys[mine], push.gradients[mine]]
            replies.append(self._servers.peer(server, "ask").begin("apply", head, arrays))
        for reply in replies:
            reply.wait()

    def add_table(self, spec: TableSpec) -> None:
        """Each server holds its part of the rows that a policy allows."""
        self._servers.call("add_table", {"spec": spec_to_json(spec)}, channel="train")
        self._dims[spec.name] = spec.dim
        self._servers.declare(spec.name, spec=spec_to_json(spec))

    def set_state(self, table: str, initial: Sequence[float], fresh: bool) -> None:
        """Set the optimizer state that new rows get, on all servers."""
        self._lookups.drain()
        self._servers.call(
            "set_state", {"table": table, "initial": list(initial), "fresh": fresh}, channel="train"
        )
        self._servers.declare(table, initial=list(initial))

    def skip(self, table: str) -> None:
        """The first server counts for all."""
        self._lookups.drain()
        self._servers.call("skip", {"table": table}, of=[0] if 0 in self._mine else [])

    def evict(self, table: str, *, step: int, now: float) -> int:
        """Evict rows on all servers."""
        return sum(a.head["rows"] for a in self._ask("evict", {"table": table, "step": step, "now": now}))

    def erase(self, table: str, keys: Keys) -> int:
        """Erase keys on the servers that have them."""
        self._lookups.drain()
        owners = owners_of(hashes_of(keys), self._count)
        replies = [
            self._servers.peer(server, "ask").begin("erase", {"table": table}, [keys[owners == server]])
            for server in self._mine
        ]
        return sum(reply.wait().head["rows"] for reply in replies)

    def clear(self, table: str) -> None:
        """Remove the rows of a table on all servers."""
        self._ask("clear", {"table": table})

    def version(self, table: str) -> int:
        """The sum of the servers' versions of a table."""
        return sum(answer.head["version"] for answer in self._ask("version", {"table": table}))

    def evicted_since(self, table: str, version: int) -> Keys:
        """Each server has its own versions, so only 0 can be asked for."""
        if version != 0:
            raise ValueError(
                f"Table '{table}' on parameter servers: expected version 0 (all keys removed so far), "
                f"got {version}."
            )
        answers = self._ask("evicted_since", {"table": table, "version": 0})
        return np.concatenate([np.empty(0, np.int64), *(answer.arrays[0] for answer in answers)])

    def snapshot(self, table: str, part: int = 0, parts: int = 1) -> Rows:
        """Read rows from all servers."""
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
        """Of W trainers each loads the rows of its share of the hashes."""
        self._lookups.drain()
        hashes = hashes_of(rows.keys)
        mine = owners_of(hashes, self._connection.world_size) == self._connection.rank
        owners = owners_of(hashes, self._count)
        replies = []
        for server in range(self._count):
            positions = np.flatnonzero(mine & (owners == server))
            for begin in range(0, len(positions), _ROWS_AT_ONCE):
                chosen = positions[begin : begin + _ROWS_AT_ONCE]
                arrays = [np.ascontiguousarray(column[chosen]) for column in rows]
                replies.append(self._servers.peer(server, "ask").begin("load", {"table": table}, arrays))
        for reply in replies:
            reply.wait()

    def stats(self, tables: Sequence[str]) -> dict[str, dict[str, int]]:
        """The counters of some tables, see `Store.stats`; of the servers that this trainer asks."""
        self._lookups.settle()
        answers = self._servers.call("stats", {"tables": list(tables)}, of=self._mine)
        counted = [answer.head["stats"] for answer in answers]
        return {
            table: {name: sum(each[table][name] for each in counted) for name in _STATS} for table in tables
        }
