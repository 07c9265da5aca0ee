"""`RemoteCaptures`: checkpoints of the rows that parameter servers hold, and the number of lost updates.

Servers hold a capture, write it into a folder and read it from there; trainers agree on its moment.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from karvan.distributed import Connection
from karvan.distributed.clients.parameter_servers import Servers
from karvan.outages import is_temporary
from karvan.store.capture import Capture
from karvan.store.remote.lookups_in_flight import LookupsInFlight
from karvan.store.types import Keys, Rows
from karvan.wire import WireError

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
        (`cluster/update_counts.py`). Of other trainers only the number of updates at the last save is known,
        so the result is the same on all trainers once a fit has ended with its save.
        """
        if not self._servers.reloads:
            return 0
        self._lookups.drain()
        made = list(self._sequences)
        made[self._connection.rank] = self._lookups.sequence
        contained = [
            answer.head["trainers"] for answer in self._servers.call("updates", {"store": self._store})
        ]
        return sum(
            max(0, number - of_server.get(str(trainer), 0))
            for of_server in contained
            for trainer, number in enumerate(made)
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
                self._servers.call("capture", {**head, "since": before}, channel="save")
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
            self._servers.peer(server, "save").begin("save", head, deadline=_SAVING)
            for server in range(len(self._servers))
        ]
        while not all(reply.done for reply in replies):
            waiting()
            replies[0].pause(0.05)
        return [reply.wait().head["shares"] for reply in replies]

    def fill(self, path: str, tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Have each server read its part."""
        self._lookups.drain()
        head = {"path": path, "tables": {name: dict(options) for name, options in tables.items()}}
        replies = [
            self._servers.peer(server, "save").begin("fill", head, deadline=_SAVING)
            for server in range(len(self._servers))
        ]
        answers = [reply.wait() for reply in replies]
        return [(str(path), str(problem)) for each in answers for path, problem in each.head["damaged"]]

    def close(self, number: int) -> None:
        """Close a capture that is not needed any more."""
        if self._connection.rank == 0:
            for server in range(len(self._servers)):
                self._servers.peer(server, "save").begin("close_capture", {"capture": number})


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
