"""`RemoteTable`: calls to parameter servers about an entire table.

Of W trainers, trainer r asks the servers r, r + W, …, so that all trainers together ask each server once.
Every request waits for the gradients that are in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from karvan.distributed import Connection
from karvan.distributed.parameter_servers import Servers
from karvan.protocol import parameter_server as protocol
from karvan.store.base import StoredTable
from karvan.store.messages import hashes_of, owners_of
from karvan.store.remote.staleness_window import LookupsInFlight
from karvan.store.types import Keys, Rows, TableSpec
from karvan.wire import Message
from karvan.wire.schema import A, Call

_ROWS_AT_ONCE = 1 << 18  # of a load
_STATS = (
    *("rows", "bytes", "inserted", "evicted", "rejected", "dropped_gradients", "skipped_updates"),
    "moved",
)


@dataclass(frozen=True)
class TableCalls:
    """The calls of one trainer about tables."""

    connection: Connection
    servers: Servers
    lookups: LookupsInFlight

    @property
    def mine(self) -> range:
        """The servers that this trainer asks."""
        return range(self.connection.rank, len(self.servers), self.connection.world_size)

    def ask(self, call: Call[Any, A], head: Mapping[str, Any]) -> list[Message[A]]:
        """The answers of the servers that this trainer asks, once they have applied its gradients."""
        self.lookups.settle()
        return self.servers.call(call, head, of=self.mine)

    def stats(self, tables: Sequence[str]) -> dict[str, dict[str, int]]:
        """The counters of some tables, see `StoredTable.stats`; of the servers that this trainer asks."""
        counted = [answer.head.stats for answer in self.ask(protocol.STATS, {"tables": list(tables)})]
        return {
            table: {name: sum(stats[table][name] for stats in counted) for name in _STATS} for table in tables
        }


class RemoteTable(StoredTable):
    """A table that is spread over parameter servers."""

    def __init__(self, spec: TableSpec, calls: TableCalls) -> None:
        self.name = spec.name
        self.dim = spec.dim
        self._calls = calls
        self._servers = calls.servers
        self._lookups = calls.lookups

    def _ask(self, call: Call[Any, A], **head: Any) -> list[Message[A]]:
        return self._calls.ask(call, {"table": self.name, **head})

    @override
    def set_state(self, initial: Sequence[float], fresh: bool) -> None:
        """On all servers."""
        self._lookups.drain()
        head = {"table": self.name, "initial": list(initial), "fresh": fresh}
        self._servers.call(protocol.SET_STATE, head, channel="train")
        self._servers.declare(self.name, initial=list(initial))

    @override
    def skip(self) -> None:
        """The first server counts for all."""
        self._lookups.drain()
        self._servers.call(protocol.SKIP, {"table": self.name}, of=[0] if 0 in self._calls.mine else [])

    @override
    def evict(self, *, step: int, now: float) -> int:
        return sum(answer.head.rows for answer in self._ask(protocol.EVICT, step=step, now=now))

    @override
    def erase(self, keys: Keys) -> int:
        """On the servers that have them."""
        self._lookups.drain()
        owners = owners_of(hashes_of(keys), len(self._servers))
        replies = [
            self._servers.peer(server, "ask").begin(
                protocol.ERASE, {"table": self.name}, [keys[owners == server]]
            )
            for server in self._calls.mine
        ]
        return sum(reply.wait().head.rows for reply in replies)

    @override
    def clear(self) -> None:
        self._ask(protocol.CLEAR)

    @property
    @override
    def version(self) -> int:
        """The sum of the servers' versions."""
        return sum(answer.head.version for answer in self._ask(protocol.VERSION))

    @override
    def evicted_since(self, version: int) -> Keys:
        """Each server has its own versions, so only 0 can be asked for."""
        if version != 0:
            raise ValueError(
                f"Table '{self.name}' on parameter servers: expected version 0 (all keys removed so far), "
                f"got {version}."
            )
        answers = self._ask(protocol.EVICTED_SINCE, version=0)
        return np.concatenate([np.empty(0, np.int64), *(answer.arrays[0] for answer in answers)])

    @override
    def snapshot(self, part: int = 0, parts: int = 1) -> Rows:
        answers = self._ask(protocol.SNAPSHOT, part=part, parts=parts)
        columns = zip(*(answer.arrays for answer in answers), strict=True)
        joined = [np.concatenate(column) for column in columns]
        return Rows._make(joined) if joined else self._no_rows()

    def _no_rows(self) -> Rows:
        none = np.empty(0, np.uint32)
        return Rows(
            np.empty(0, np.int64),
            np.empty((0, self.dim), np.float32),
            np.empty((0, 0), np.float32),
            none,
            none,
        )

    @override
    def load(self, rows: Rows) -> None:
        """Of W trainers each loads the rows of its share of the hashes."""
        self._lookups.drain()
        connection, count = self._calls.connection, len(self._servers)
        hashes = hashes_of(rows.keys)
        mine = owners_of(hashes, connection.world_size) == connection.rank
        owners = owners_of(hashes, count)
        replies = []
        for server in range(count):
            positions = np.flatnonzero(mine & (owners == server))
            for begin in range(0, len(positions), _ROWS_AT_ONCE):
                chosen = positions[begin : begin + _ROWS_AT_ONCE]
                arrays = [np.ascontiguousarray(column[chosen]) for column in rows]
                replies.append(
                    self._servers.peer(server, "ask").begin(protocol.LOAD, {"table": self.name}, arrays)
                )
        for reply in replies:
            reply.wait()

    @override
    def extra(self) -> dict[str, NDArray[Any]]:
        """Nothing, because servers save theirs themselves."""
        return {}

    @override
    def load_extra(self, extra: Mapping[str, NDArray[Any]]) -> None:
        """Does nothing, as `extra` returns nothing."""

    @override
    def stats(self) -> dict[str, int]:
        return self._calls.stats([self.name])[self.name]
