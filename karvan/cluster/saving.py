"""A parameter server's part in checkpoints: it writes its own share of every table, and reads it back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from karvan.checkpoint import Checkpoint
from karvan.checkpoint.checkpoint import with_state
from karvan.checkpoint.extras import own_extra, read_extras
from karvan.checkpoint.files import FileEntry, Stored, write_arrays
from karvan.checkpoint.pace import Pace
from karvan.checkpoint.pending import Writers
from karvan.checkpoint.ranges import share_of
from karvan.checkpoint.shares import Source, put_table
from karvan.store import Capture, MemoryStore, TableSpec


class Saving:
    """What a server holds for checkpoints, and what it remembers of earlier ones for deltas."""

    def __init__(self, store: MemoryStore, specs: Mapping[str, TableSpec], server: int, servers: int) -> None:
        self._store = store
        self._specs = specs
        self._server = server
        self._servers = servers
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Capture, dict[str, Any]]] = {}
        self._versions: dict[int, dict[str, int]] = {}  # of captures that a delta may build on

    def capture(
        self, number: int, tables: list[str], parts: dict[str, int], since: int | None, track: bool
    ) -> None:
        """Hold the tables as they are now, under a number."""
        versions = None
        if since is not None:
            if since not in self._versions:
                raise ValueError(f"expected a capture that was tracked, got {since}.")
            versions = {name: self._versions[since][name] for name in tables}
        with self._lock:
            capture = self._store.capture(tables, parts, versions, track=track)
            extras = {
                name: own_extra(self._store.extra(name), self._server, self._servers) for name in tables
            }
            self._open[number] = (capture, extras)
            if track:
                self._versions = {number: dict(capture.versions)}

    def hold(self, number: int, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """For a server that began anew after a capture: what it has now stands for what was lost."""
        if number not in self._open:
            parts = {name: int(told["parts"]) for name, told in tables.items()}
            self.capture(number, list(tables), parts, None, False)

    def close(self, number: int) -> None:
        """Let go of it."""
        with self._lock:
            held = self._open.pop(number, None)
        if held is not None:
            held[0].close()

    def close_all(self) -> None:
        """Let go of everything."""
        for number in list(self._open):
            self.close(number)

    def save(self, number: int, folder: Path, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Write this server's share of a capture; returns what there is to tell of the tables."""
        if number not in self._open:
            raise ValueError(f"expected a capture that is held, got {number}.")
        if not folder.is_dir():
            raise ValueError(
                f"expected to see {folder}, which the trainer has made, got nothing: checkpoints must lie on "
                "storage that all roles share."
            )
        capture, extras = self._open[number]
        pace, writers = Pace(), Writers()

        def put(note: Callable[[FileEntry], None], name: str, arrays: Mapping[str, Stored]) -> None:
            writers.put(lambda: note(write_arrays(folder, name, arrays, pace)))

        try:
            made = {
                name: put_table(self._source(name, told, capture, extras[name]), folder, put, pace)
                for name, told in tables.items()
            }
            writers.finish()
            return {name: told() for name, told in made.items()}
        finally:
            writers.end()

    def _source(self, name: str, told: Mapping[str, Any], capture: Capture, extra: Any) -> Source:
        return Source(
            self._specs[name],
            told["optimizer"],
            capture,
            int(told["parts"]),
            extra,
            bool(told["delta"]),
            self._server,
            self._servers,
        )

    def fill(self, path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Empty tables, and read this server's rows of a checkpoint."""
        checkpoint = Checkpoint(path)
        share = share_of(self._server, self._servers)
        for name, told in tables.items():
            self._store.clear(name)
            for rows in checkpoint.parts(name, share):
                self._store.load(name, with_state(rows, told["initial"], bool(told["keep"])))
            if told["extra"]:
                extra = read_extras(path, checkpoint.manifest.tables[name].extras, share)
                if extra:
                    self._store.load_extra(name, extra)
