"""`RemoteTables`: calls to parameter servers about tables.

Of W trainers, number r speaks for the servers r, r + W, …, so that all trainers together have each server
once. Whatever is asked waits for the gradients that are on their way.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from karvan import distributed
from karvan.outages import is_temporary
from karvan.store.base import Counts, Found, Keys, Push, Rows, Rule, SharedStore, StalenessStats, TableSpec
from karvan.store.capture import Capture
from karvan.store.exchange.key_sharding import hashes_of, owners_of
from karvan.store.exchange.wire_format import rule_to_json, spec_to_json
from karvan.store.remote.staleness_window import Countdown, StalenessWindow, taken
from karvan.wire import Message, Reply, WireError
from karvan.wire.schema.calls import expect_array

_log = logging.getLogger("karvan.store")

_ROWS_AT_ONCE = 1 << 18  # of a load
_SAVING = 24 * 3600.0  # seconds for what depends on the size of tables; signs of life come meanwhile
_STATS = (
    *("rows", "bytes", "inserted", "evicted", "rejected", "dropped_gradients", "skipped_updates"),
    "moved",
)


class RemoteTables(SharedStore):
    """Tables that are spread over parameter servers."""

    def __init__(self, connection: distributed.Connection) -> None:
        assert connection.servers is not None
        self._connection = connection
        self._servers = connection.servers
        self.count = len(self._servers)
        self.window = StalenessWindow(connection.settings.staleness)
        self._dims: dict[str, int] = {}
        self._mine = range(connection.rank, self.count, connection.world)
        self._store = self._servers.new_store()
        self._sequence = 0  # of the last push
        self._sequences = [0] * connection.world  # of each trainer's, at the last capture
        self._ahead: set[int] = set()  # training lookups that no forward has used yet
        self._used: set[int] = set()  # … that one has, and that have had no push
        # Lookups that were dropped before they were used, and the workers that made them.
        self._withdrawn: deque[tuple[int | None, int]] = deque()
        self._servers.when_lost(self._note_loss)

    def dim(self, table: str) -> int:
        """The floats of a vector."""
        return self._dims[table]

    @property
    def ahead(self) -> StalenessStats:
        """See `Store.ahead`."""
        return StalenessStats(self.window.lookups, self.window.total, self.window.most)

    @property
    def share(self) -> tuple[int, int]:
        """See `Store.share`; of what passes through this process."""
        return self._connection.rank, self._connection.world

    def settle(self) -> None:
        """Wait until all gradients have been applied, and lookups that were dropped have been undone."""
        for reply in self._send_withdrawn():
            reply.wait()
        self.window.drain()

    def _send_withdrawn(self) -> list[Reply]:
        """Withdraw the lookups that nobody will use any more."""
        withdrawn = taken(self._withdrawn)
        if not withdrawn:
            return []
        head = {"store": self._store, "batches": [number for _, number in withdrawn]}
        pending = Countdown(self.count, partial(self._forget_withdrawn, withdrawn), self.window.fail)
        return [
            self._servers.peer(server).begin("withdraw", head, then=lambda reply: pending.one(reply.error))
            for server in range(self.count)
        ]

    def _forget_withdrawn(self, withdrawn: list[tuple[int | None, int]]) -> None:
        """Servers have undone these lookups; the workers that made some of them need not keep them."""

    def _ask(self, method: str, head: Mapping[str, Any]) -> list[Message]:
        """The answers of the servers that this trainer speaks for, after its gradients."""
        self.settle()
        return self._servers.call(method, head, of=self._mine)

    def _note_loss(self, server: int, life: str) -> None:
        _log.warning(
            "Parameter server %d has restarted with the rows that were saved last: updates since are lost.",
            server,
        )

    @property
    def lost_updates(self) -> int:
        """How many updates of all trainers are not in the rows, because servers have restarted.

        A push to two servers is two updates. Servers count what they contain (`cluster/update_counts.py`).
        Of other trainers it is known how many they had made at the last save; so the number is the same on
        all trainers once a fit has ended with its save.
        """
        if not self._servers.reloads:
            return 0
        self.window.drain()
        made = list(self._sequences)
        made[self._connection.rank] = self._sequence
        contained = [
            answer.head["trainers"] for answer in self._servers.call("updates", {"store": self._store})
        ]
        return sum(
            max(0, number - of_server.get(str(trainer), 0))
            for of_server in contained
            for trainer, number in enumerate(made)
        )

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
        """See `Store.add_table`; each server holds its part of the rows that a policy allows."""
        self._servers.call("add_table", {"spec": spec_to_json(spec)}, line="train")
        self._dims[spec.name] = spec.dim
        self._servers.declare(spec.name, spec=spec_to_json(spec))

    def set_state(self, table: str, initial: Sequence[float], fresh: bool) -> None:
        """See `Store.set_state`."""
        self.window.drain()
        self._servers.call(
            "set_state", {"table": table, "initial": list(initial), "fresh": fresh}, line="train"
        )
        self._servers.declare(table, initial=list(initial))

    def skip(self, table: str) -> None:
        """See `Store.skip`; the first server counts for all."""
        self.window.drain()
        self._servers.call("skip", {"table": table}, of=[0] if 0 in self._mine else [])

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
        return self._stats([table])[table]

    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """See `Store.sizes`; one question for all."""
        return {table: told["rows"] for table, told in self._stats(tables).items()}

    def _stats(self, tables: Sequence[str]) -> dict[str, dict[str, int]]:
        self.settle()
        answers = self._servers.call("stats", {"tables": list(tables)}, of=self._mine)
        told = [answer.head["stats"] for answer in answers]
        return {table: {name: sum(each[table][name] for each in told) for name in _STATS} for table in tables}

    def capture(
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
    ) -> Capture:
        """See `Store.capture`; a collective of all trainers. The servers hold it and write it down.

        Lookups that run ahead may be answered at any time meanwhile; servers leave out all those whose batch
        has neither had a push nor been used (`_used`).
        """
        self.settle()
        channel = self._connection.here
        # Gradients of all trainers are there, then. A lookup without a gradient may be done with, and servers
        # need not have heard of it yet.
        said = channel.gather_json([self._sequence, sorted(self._used)])
        self._used.clear()
        self._sequences = [sequence for sequence, _ in said]
        told: dict[str, Any] = {}
        if channel.rank == 0:
            number = secrets.randbits(52)
            head = {"capture": number, "tables": list(tables), "parts": dict(parts), "track": track}
            head |= {"store": self._store, "used": [used for _, used in said]}
            before = None if since is None else max(since.values(), default=0)
            try:
                # On the line on which the one before was closed, so that it is.
                self._servers.call("capture", {**head, "since": before}, line="save")
                told["number"] = number
            except Exception as error:  # to be raised on all
                self.close_capture(number)  # of the servers that have it
                told["error"] = [type(error).__name__, str(error), is_temporary(error)]
        told = channel.gather_json(told)[0]
        if "error" in told:
            kind, text, temporary = told["error"]
            if temporary:
                raise WireError(text)
            raise ValueError(text) if kind == "ValueError" else RuntimeError(text)
        return _Captured(self, tables, told["number"])

    def save_away(
        self,
        capture: Capture,
        folder: str,
        tables: Mapping[str, Mapping[str, Any]],
        waiting: Callable[[], None],
    ) -> list[dict[str, Any]]:
        """See `SharedStore.save_away`."""
        assert isinstance(capture, _Captured)
        head = {
            "capture": capture.number,
            "store": self._store,
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

    def fill_away(self, path: str, tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        """See `SharedStore.fill_away`."""
        self.window.drain()
        head = {"path": path, "tables": {name: dict(told) for name, told in tables.items()}}
        replies = [
            self._servers.peer(server, "save").begin("fill", head, deadline=_SAVING)
            for server in range(self.count)
        ]
        answers = [reply.wait() for reply in replies]
        return [(str(path), str(problem)) for each in answers for path, problem in each.head["damaged"]]

    def close_capture(self, number: int) -> None:
        """For a capture that is not needed any more."""
        if self._connection.rank == 0:
            for server in range(self.count):
                self._servers.peer(server, "save").begin("close_capture", {"capture": number})


class _Captured(Capture):
    """What servers hold of one moment. They write it; nobody reads it here."""

    def __init__(self, store: RemoteTables, tables: Sequence[str], number: int) -> None:
        self._store = store
        self.number = number
        self.versions = dict.fromkeys(tables, number)
        self._open = True

    def part(self, table: str, part: int) -> Rows:
        """See `Capture.part`."""
        raise TypeError("Servers write what was captured; see SharedStore.save_away.")

    def erased(self, table: str) -> Keys:
        """See `Capture.erased`."""
        raise TypeError("Servers write what was captured; see SharedStore.save_away.")

    def close(self) -> None:
        """See `Capture.close`."""
        if self._open:
            self._open = False
            self._store.close_capture(self.number)
