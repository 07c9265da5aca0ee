"""`RemoteStore`: rows on parameter servers, each of which owns a range of the key hashes.

It is made of parts: `RemoteBatches` for lookups and gradients, `RemoteTables` for entire tables,
`RemoteCaptures` for checkpoints, and `LookupsInFlight`, which these share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.distributed import Connection
from karvan.store.base import SharedStore
from karvan.store.capture import Capture
from karvan.store.program import LookupInputs, LookupPlan, LookupProgram, Prepared
from karvan.store.remote.batches import LocalGradients, RemoteBatches
from karvan.store.remote.captures import RemoteCaptures
from karvan.store.remote.lookups_in_flight import LookupsInFlight
from karvan.store.remote.staleness_window import StalenessWindow
from karvan.store.remote.tables import RemoteTables
from karvan.store.types import Counts, Found, Keys, Push, Rows, Rule, StalenessStats, TableSpec

_log = logging.getLogger("karvan.store")


class RemoteStore(SharedStore):
    """Tables that are spread over parameter servers."""

    def __init__(self, connection: Connection) -> None:
        assert connection.servers is not None
        servers = connection.servers
        number = servers.new_store()
        self._connection = connection
        self._lookups = LookupsInFlight(servers, number, connection.settings.staleness)
        self._tables = RemoteTables(connection, servers, self._lookups)
        self._captures = RemoteCaptures(connection, servers, number, self._lookups)
        self.batches = RemoteBatches(connection, servers, number, self._lookups, self._tables.dim)
        servers.on_restart(_note_loss)

    @property
    def window(self) -> StalenessWindow:
        """The batches between lookup and acknowledged gradient."""
        return self._lookups.window

    @property
    @override
    def takes_references(self) -> bool:
        return self.batches.at_workers is not None

    @property
    @override
    def staleness(self) -> StalenessStats:
        return StalenessStats(self.window.lookups, self.window.total, self.window.most)

    @property
    @override
    def share(self) -> tuple[int, int]:
        """Of the rows that pass through this process."""
        return self._connection.rank, self._connection.world_size

    @property
    def lost_updates(self) -> int:
        """How many updates were lost with servers that died."""
        return self._captures.lost_updates()

    @override
    def prepare(
        self,
        program: LookupProgram,
        inputs: LookupInputs,
        *,
        training: bool | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> Prepared:
        return self.batches.prepare(program, inputs, training=training, step=step, now=now)

    @override
    def forward(
        self,
        program: LookupProgram,
        inputs: LookupInputs | Prepared,
        *,
        training: bool,
        step: int,
        now: float,
    ) -> LookupPlan:
        return self.batches.forward(program, inputs, training=training, step=step, now=now)

    @override
    def reduce(self, plan: LookupPlan, addresses: Sequence[int], strides: Sequence[int]) -> LocalGradients:
        return self.batches.reduce(plan, addresses, strides)

    @override
    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> LocalGradients:
        return self.batches.hold(plan, gradients)

    @override
    def update(
        self,
        program: LookupProgram,
        gradients: Sequence[tuple[LookupPlan, LocalGradients]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        self.batches.update(program, gradients, rules, steps)

    @override
    def add_table(self, spec: TableSpec) -> None:
        self._tables.add_table(spec)

    @override
    def set_state(self, table: str, initial: Sequence[float], fresh: bool) -> None:
        self._tables.set_state(table, initial, fresh)

    @override
    def lookup(
        self, keys: Mapping[str, tuple[Keys, Counts]], *, training: bool, step: int, now: float
    ) -> dict[str, Found]:
        return self._tables.lookup(keys, training=training, step=step, now=now)

    @override
    def apply(
        self, pushes: Mapping[str, Sequence[Push]], rules: Mapping[str, Rule], steps: Mapping[str, int]
    ) -> None:
        self._tables.apply(pushes, rules, steps)

    @override
    def skip(self, table: str) -> None:
        self._tables.skip(table)

    @override
    def evict(self, table: str, *, step: int, now: float) -> int:
        return self._tables.evict(table, step=step, now=now)

    @override
    def erase(self, table: str, keys: Keys) -> int:
        return self._tables.erase(table, keys)

    @override
    def clear(self, table: str) -> None:
        self._tables.clear(table)

    @override
    def version(self, table: str) -> int:
        return self._tables.version(table)

    @override
    def evicted_since(self, table: str, version: int) -> Keys:
        return self._tables.evicted_since(table, version)

    @override
    def snapshot(self, table: str, part: int = 0, parts: int = 1) -> Rows:
        return self._tables.snapshot(table, part, parts)

    @override
    def load(self, table: str, rows: Rows) -> None:
        self._tables.load(table, rows)

    @override
    def extra(self, table: str) -> dict[str, NDArray[Any]]:
        """Nothing, because servers save theirs themselves."""
        return {}

    @override
    def load_extra(self, table: str, extra: Mapping[str, NDArray[Any]]) -> None:
        """Does nothing, as `extra` returns nothing."""

    @override
    def stats(self, table: str) -> dict[str, int]:
        return self._tables.stats([table])[table]

    @override
    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """One request for all."""
        return {table: stats["rows"] for table, stats in self._tables.stats(tables).items()}

    @override
    def capture(
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
    ) -> Capture:
        return self._captures.capture(tables, parts, since, track=track)

    @override
    def save_tables(
        self,
        capture: Capture,
        folder: str,
        tables: Mapping[str, Mapping[str, Any]],
        waiting: Callable[[], None],
        *,
        writers: int,
    ) -> list[dict[str, Any]]:
        return self._captures.save(capture, folder, tables, waiting, writers=writers)

    @override
    def fill_tables(self, path: str, tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        return self._captures.fill(path, tables)


def _note_loss(server: int, life: str) -> None:
    _log.warning(
        "Parameter server %d has restarted with the rows of the last checkpoint: later updates are lost.",
        server,
    )
