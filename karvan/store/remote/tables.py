"""`RemoteTable`: calls to parameter servers about an entire table.

Of W trainers, trainer r asks the servers r, r + W, …, so that all trainers together ask each server once.
Every request waits for the gradients that are in flight.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from karvan.distributed import Connection
from karvan.distributed.parameter_servers import Servers
from karvan.errors import is_temporary
from karvan.protocol import parameter_server as protocol
from karvan.store.base import StoredTable
from karvan.store.messages import hashes_of, owners_of
from karvan.store.remote.staleness_window import LookupsInFlight
from karvan.store.types import Capture, Keys, Rows, TableSpec
from karvan.wire import Message, WireError
from karvan.wire.schema import A, Call

# `RemoteCaptures`: checkpoints of the rows that parameter servers hold, and the number of lost updates.
#
# Servers hold a capture, write it into a folder and read it from there; trainers agree on its moment.


_SAVING = 24 * 3600.0  # seconds for calls that depend on the size of tables; heartbeats come meanwhile


class RemoteCaptures:
    """The captures of one store."""

    def __init__(
        self, connection: Connection, servers: Servers, store: int, lookups: LookupsInFlight
    ) -> None:
        self._connection = connection
        self._servers = servers
        self._store = store
        self._lookups = lookups
        self._sequences = [0] * connection.world_size  # of each trainer's last push, at the last capture

    def lost_updates(self) -> int:
        """How many updates of all trainers are not in the rows, because servers have restarted.

         A push to two servers is two updates. Servers count the updates in their rows
        . Of other trainers only the number of updates at the last save is known,
         so the result is the same on all trainers once a fit has ended with its save.
        """
        if not self._servers.reloads:
            return 0
        self._lookups.drain()
        tables = list(self._sequences)
        tables[self._connection.rank] = self._lookups.sequence
        contained = [
            answer.head.trainers for answer in self._servers.call(protocol.UPDATES, {"store": self._store})
        ]
        return sum(
            max(0, number - of_server.get(str(trainer), 0))
            for of_server in contained
            for trainer, number in enumerate(tables)
        )

    def capture(
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
    ) -> Capture:
        """This is a collective of all trainers. The servers hold the capture and write it.

        Lookups that run ahead may be answered at any time meanwhile; servers omit all those whose batch has
        neither had a push nor been used.
        """
        self._lookups.settle()
        channel = self._connection.here
        # After this the servers have the gradients of all trainers. A lookup without a gradient may have been
        # used, which servers may not know yet, so the capture names these.
        trainers = channel.gather_json([self._lookups.sequence, self._take_used()])
        self._sequences = [sequence for sequence, _ in trainers]
        outcome: dict[str, Any] = {}
        if channel.rank == 0:
            number = secrets.randbits(52)
            head = {"capture": number, "tables": list(tables), "parts": dict(parts), "track": track}
            head |= {"store": self._store, "used": [used for _, used in trainers]}
            before = None if since is None else max(since.values(), default=0)
            try:
                # On the channel on which the previous capture was closed, so that it is closed by now.
                self._servers.call(protocol.CAPTURE, {**head, "since": before}, channel="save")
                outcome["number"] = number
            except Exception as error:  # raised on all trainers below
                self.close(number)  # on the servers that have it
                outcome["error"] = [type(error).__name__, str(error), is_temporary(error)]
        outcome = channel.gather_json(outcome)[0]
        if "error" in outcome:
            kind, text, temporary = outcome["error"]
            if temporary:
                raise WireError(text)
            raise ValueError(text) if kind == "ValueError" else RuntimeError(text)
        return _ServerCapture(self, tables, outcome["number"])

    def _take_used(self) -> list[int]:
        """Those lookups; in an elastic run they count once servers know that they are done."""
        return [] if self._servers.commits.elastic else self._lookups.take_used()

    def save(
        self,
        capture: Capture,
        folder: str,
        tables: Mapping[str, Mapping[str, Any]],
        waiting: Callable[[], None],
        *,
        writers: int,
    ) -> list[dict[str, Any]]:
        """Have each server write its part."""
        assert isinstance(capture, _ServerCapture)
        head = {
            "capture": capture.number,
            "store": self._store,
            "folder": folder,
            "tables": {n: dict(t) for n, t in tables.items()},
            "writers": writers,
        }
        replies = [
            self._servers.peer(server, "save").begin(protocol.SAVE, head, deadline=_SAVING)
            for server in range(len(self._servers))
        ]
        while not all(reply.done for reply in replies):
            waiting()
            replies[0].pause(0.05)
        return [reply.wait().head.shares for reply in replies]

    def fill(self, path: str, tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Have each server read its part."""
        self._lookups.drain()
        head = {"path": path, "tables": {name: dict(options) for name, options in tables.items()}}
        replies = [
            self._servers.peer(server, "save").begin(protocol.FILL, head, deadline=_SAVING)
            for server in range(len(self._servers))
        ]
        answers = [reply.wait() for reply in replies]
        return [(path, problem) for answer in answers for path, problem in answer.head.damaged]

    def close(self, number: int) -> None:
        """Close a capture that is not needed any more."""
        if self._connection.rank == 0:
            for server in range(len(self._servers)):
                self._servers.peer(server, "save").begin(protocol.CLOSE_CAPTURE, {"capture": number})


class _ServerCapture(Capture):
    """A capture that servers hold. They write it; it cannot be read here."""

    def __init__(self, captures: RemoteCaptures, tables: Sequence[str], number: int) -> None:
        self._captures = captures
        self.number = number
        self.versions = dict.fromkeys(tables, number)
        self._open = True

    @override
    def part(self, table: str, part: int) -> Rows:
        raise TypeError("Servers write their captures themselves; use SharedStore.save_tables.")

    @override
    def erased(self, table: str) -> Keys:
        raise TypeError("Servers write their captures themselves; use SharedStore.save_tables.")

    @override
    def close(self) -> None:
        if self._open:
            self._open = False
            self._captures.close(self.number)


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
