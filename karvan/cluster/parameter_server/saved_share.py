"""`SavedShare`: a restored server's rows of the checkpoint it was restored from, in place of a lost capture.

If a server dies between the capture of a save and the end of its writing, the captured rows are lost.
The server that replaces it has the rows of the checkpoint before, and perhaps updates that came after the
capture, which the new checkpoint must not have. So it writes what it was restored from: the rows that it
would have had at the capture, with the same updates lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from karvan.checkpoint import Checkpoint
from karvan.checkpoint.checkpoint import with_state
from karvan.checkpoint.format.manifest import pieces, share_of
from karvan.checkpoint.format.table_arrays import Extra, join, own_extra, read_extras
from karvan.cluster.parameter_server.update_counts import UpdateCounts
from karvan.store import Capture, Rows, TableSpec
from karvan.store.types import Keys
from karvan.wire import RefusedError


class Restored(NamedTuple):
    """What a server was restored from; no checkpoint if nothing had been saved.

    tables: for each table, whether the checkpoint's optimizer state is used (`keep`), and the `initial` one.
    """

    checkpoint: Checkpoint | None
    tables: Mapping[str, Mapping[str, Any]]
    updates: UpdateCounts  # of the checkpoint


class SavedShare(Capture):
    """The rows of server number `server` of `servers`.

    tables: from the save's request, see `SharedStore.save_tables`. A delta must build on the checkpoint that
    the server was restored from, and is then empty.
    """

    def __init__(
        self,
        restored: Restored,
        specs: Mapping[str, TableSpec],
        tables: Mapping[str, Mapping[str, Any]],
        server: int,
        servers: int,
    ) -> None:
        self._checkpoint = restored.checkpoint
        self._restored_tables = restored.tables
        self._specs = specs
        self._tables = tables
        self._server, self._servers = server, servers
        self._share = share_of(server, servers)
        self.versions = {}
        restored_id = None if self._checkpoint is None else self._checkpoint.manifest.id
        for name, request in tables.items():
            if request["delta"] and request["base"] != restored_id:
                raise RefusedError(
                    f"expected to save what changed in table '{name}' since the checkpoint that this server "
                    "was restored from, got another one: this save fails, and the next one is a full one."
                )

    @override
    def part(self, table: str, part: int) -> Rows:
        mine = pieces(int(self._tables[table]["parts"]), self._share)
        restored = self._restored_tables.get(table, {"initial": (), "keep": False})
        found: list[Rows] = []
        if part in mine and self._saved(table) and not self._tables[table]["delta"]:
            assert self._checkpoint is not None
            found = list(self._checkpoint.parts(table, mine[part]))
        rows = join(found) if found else self._no_rows(table)
        return with_state(rows, restored["initial"], bool(restored["keep"]) and bool(found))

    @override
    def erased(self, table: str) -> Keys:
        return np.empty(0, np.int64)

    def extra(self, table: str) -> Extra:
        """What the table has besides rows."""
        if not self._saved(table):
            return {}
        assert self._checkpoint is not None
        files = self._checkpoint.manifest.tables[table].extras
        found = read_extras(self._checkpoint.path, files, self._share)
        return own_extra(found, self._server, self._servers)

    @override
    def close(self) -> None:
        pass

    def _saved(self, table: str) -> bool:
        return self._checkpoint is not None and table in self._checkpoint.manifest.tables

    def _no_rows(self, table: str) -> Rows:
        none = np.empty(0, np.uint32)
        vectors = np.empty((0, self._specs[table].dim), np.float32)
        return Rows(np.empty(0, np.int64), vectors, np.empty((0, 0), np.float32), none, none)
