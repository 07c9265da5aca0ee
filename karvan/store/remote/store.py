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
    def takes_references(self) -> bool:
        """See `Store.takes_references`."""
        return self.batches.at_workers is not None

    @property
    def staleness(self) -> StalenessStats:
        """See `Store.staleness`."""
        return StalenessStats(self.window.lookups, self.window.total, self.window.most)

    @property
    def share(self) -> tuple[int, int]:
        """See `Store.share`; of the rows that pass through this process."""
        return self._connection.rank, self._connection.world_size

    @property
    def lost_updates(self) -> int:
        """See `RemoteCaptures.lost_updates`."""
        return self._captures.lost_updates()

    def prepare(
        self,
        program: LookupProgram,
        inputs: LookupInputs,
        *,
        training: bool | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> Prepared:
        """See `RemoteBatches.prepare`."""
        return self.batches.prepare(program, inputs, training=training, step=step, now=now)

    def forward(
        self,
        program: LookupProgram,
        inputs: LookupInputs | Prepared,
        *,
        training: bool,
        step: int,
        now: float,
    ) -> LookupPlan:
        """See `RemoteBatches.forward`."""
        return self.batches.forward(program, inputs, training=training, step=step, now=now)

    def reduce(self, plan: LookupPlan, addresses: Sequence[int], strides: Sequence[int]) -> LocalGradients:
        """See `RemoteBatches.reduce`."""
        return self.batches.reduce(plan, addresses, strides)

    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> LocalGradients:
        """See `RemoteBatches.hold`."""
        return self.batches.hold(plan, gradients)

    def update(
        self,
        program: LookupProgram,
        gradients: Sequence[tuple[LookupPlan, LocalGradients]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """See `RemoteBatches.update`."""
        self.batches.update(program, gradients, rules, steps)

    def add_table(self, spec: TableSpec) -> None:
        """See `RemoteTables.add_table`."""
        self._tables.add_table(spec)

    def set_state(self, table: str, initial: Sequence[float], fresh: bool) -> None:
        """See `RemoteTables.set_state`."""
        self._tables.set_state(table, initial, fresh)

    def lookup(
        self, keys: Mapping[str, tuple[Keys, Counts]], *, training: bool, step: int, now: float
    ) -> dict[str, Found]:
        """See `RemoteTables.lookup`."""
        return self._tables.lookup(keys, training=training, step=step, now=now)

    def apply(
        self, pushes: Mapping[str, Sequence[Push]], rules: Mapping[str, Rule], steps: Mapping[str, int]
    ) -> None:
        """See `RemoteTables.apply`."""
        self._tables.apply(pushes, rules, steps)

    def skip(self, table: str) -> None:
        """See `RemoteTables.skip`."""
        self._tables.skip(table)

    def evict(self, table: str, *, step: int, now: float) -> int:
        """See `RemoteTables.evict`."""
        return self._tables.evict(table, step=step, now=now)

    def erase(self, table: str, keys: Keys) -> int:
        """See `RemoteTables.erase`."""
        return self._tables.erase(table, keys)

    def clear(self, table: str) -> None:
        """See `RemoteTables.clear`."""
        self._tables.clear(table)

    def version(self, table: str) -> int:
        """See `RemoteTables.version`."""
        return self._tables.version(table)

    def evicted_since(self, table: str, version: int) -> Keys:
        """See `RemoteTables.evicted_since`."""
        return self._tables.evicted_since(table, version)

    def snapshot(self, table: str, part: int = 0, parts: int = 1) -> Rows:
        """See `RemoteTables.snapshot`."""
        return self._tables.snapshot(table, part, parts)

    def load(self, table: str, rows: Rows) -> None:
        """See `RemoteTables.load`."""
        self._tables.load(table, rows)

    def extra(self, table: str) -> dict[str, NDArray[Any]]:
        """See `Store.extra`: nothing, because servers save theirs themselves."""
        return {}

    def load_extra(self, table: str, extra: Mapping[str, NDArray[Any]]) -> None:
        """See `Store.load_extra`: does nothing, as `extra` returns nothing."""

    def stats(self, table: str) -> dict[str, int]:
        """See `RemoteTables.stats`."""
        return self._tables.stats([table])[table]

    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """See `Store.sizes`; one request for all."""
        return {table: stats["rows"] for table, stats in self._tables.stats(tables).items()}

    def capture(
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
    ) -> Capture:
        """See `RemoteCaptures.capture`."""
        return self._captures.capture(tables, parts, since, track=track)

    def save_tables(
        self,
        capture: Capture,
        folder: str,
        tables: Mapping[str, Mapping[str, Any]],
        waiting: Callable[[], None],
        *,
        writers: int,
    ) -> list[dict[str, Any]]:
        """See `RemoteCaptures.save`."""
        return self._captures.save(capture, folder, tables, waiting, writers=writers)

    def fill_tables(self, path: str, tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        """See `RemoteCaptures.fill`."""
        return self._captures.fill(path, tables)


def _note_loss(server: int, life: str) -> None:
    _log.warning(
        "Parameter server %d has restarted with the rows of the last checkpoint: later updates are lost.",
        server,
    )
