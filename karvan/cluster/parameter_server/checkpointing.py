"""A parameter server's part in checkpoints: it writes its own share of every table, and reads it back.

A save has three calls: `capture` takes the tables as they are, `save` writes them into a folder that a
trainer has made, `close_capture` releases them. If a server dies after the first, its replacement, restored
from the checkpoint before, is asked to `save` a capture that it does not have: it writes the rows that it was
restored from (`SavedShare`). Files of the process that died may be in the folder, and that process may even
be alive and still writing; so a file that exists is never opened. A repeated save takes other names, the
manifest has the names of the share that was completed last, and the trainer removes the rest.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from karvan.checkpoint import Checkpoint
from karvan.checkpoint.checkpoint import with_state
from karvan.checkpoint.format.manifest import share_of
from karvan.checkpoint.format.safetensors_file import FileEntry, Stored, Throttle, write_arrays
from karvan.checkpoint.format.table_arrays import own_extra, read_extras
from karvan.checkpoint.io.pending_save import Writers
from karvan.checkpoint.io.table_files import ShareSource, put_table
from karvan.cluster.parameter_server.saved_share import Restored, SavedShare
from karvan.job.checkpoint_url import url_of
from karvan.native import _native
from karvan.store import Capture, MemoryStore, TableSpec


class _Held(NamedTuple):
    """A capture, with what else a share has; `updates` are those that the rows contain.

    trainer: which has asked for it.
    """

    capture: Capture
    extras: Mapping[str, Any]
    updates: Mapping[str, Any]
    trainer: int = 0


class Saving:
    """What a server holds for checkpoints, and what it remembers of earlier ones for deltas."""

    def __init__(self, store: MemoryStore, specs: Mapping[str, TableSpec], server: int, servers: int) -> None:
        self._store = store
        self._specs = specs
        self._server = server
        self._servers = servers
        self._lock = threading.Lock()
        self._open: dict[int, _Held] = {}
        self._versions: dict[int, dict[str, int]] = {}  # of captures that a delta may build on

    def capture(
        self,
        number: int,
        tables: list[str],
        parts: dict[str, int],
        since: int | None,
        track: bool,
        updates: Mapping[str, Any],
        log: _native.LookupLog | None,
        trainer: int = 0,
    ) -> None:
        """Hold the tables as they are now, under a number; `updates` are those that they contain.

        log: lookups in flight, which are not captured. trainer: which asks for it.
        """
        versions = None
        if since is not None:
            if since not in self._versions:
                raise ValueError(f"expected a tracked capture, got {since}.")
            versions = {name: self._versions[since][name] for name in tables}
        with self._lock:
            capture = self._store.capture(tables, parts, versions, track=track, log=log)
            extras = {
                name: own_extra(self._store.table(name).extra(log), self._server, self._servers)
                for name in tables
            }
            self._open[number] = _Held(capture, extras, updates, trainer)
            if track:
                self._versions = {number: dict(capture.versions)}

    def replace_lost(
        self, number: int, tables: Mapping[str, Mapping[str, Any]], store: int, restored: Restored
    ) -> None:
        """For a server that was restored after a capture, and does not have it."""
        if number not in self._open:
            share = SavedShare(restored, self._specs, tables, self._server, self._servers)
            extras = {name: share.extra(name) for name in tables}
            self._open[number] = _Held(share, extras, restored.updates.record(store))

    def close(self, number: int) -> None:
        """Release a capture."""
        with self._lock:
            held = self._open.pop(number, None)
        if held is not None:
            held.capture.close()

    def close_of(self, trainer: int) -> None:
        """Release the captures of a trainer that is gone."""
        for number, held in list(self._open.items()):
            if held.trainer == trainer:
                self.close(number)

    def close_all(self) -> None:
        """Release all captures."""
        for number in list(self._open):
            self.close(number)

    def save(
        self, number: int, folder: Path, tables: Mapping[str, Mapping[str, Any]], writer_count: int
    ) -> dict[str, Any]:
        """Write this server's share of a capture; returns its entry of the manifest for each table."""
        if number not in self._open:
            raise ValueError(f"expected a capture that is held, got {number}.")
        if url_of(folder) is None and not folder.is_dir():
            raise ValueError(
                f"expected to see {folder} of the trainer, got nothing: checkpoints must be on storage "
                "that all roles share."
            )
        held = self._open[number]
        if missing := [name for name in tables if name not in held.extras]:
            raise ValueError(f"expected tables that were captured, got '{missing[0]}'.")
        pace, writers = Throttle(), Writers(writer_count)

        def put(note: Callable[[FileEntry], None], name: str, arrays: Mapping[str, Stored]) -> None:
            writers.put(lambda: note(_write_unused(folder, name, arrays, pace)))

        try:
            shares = {
                name: put_table(self._source(name, spec, held.capture, held.extras[name]), folder, put, pace)
                for name, spec in tables.items()
            }
            writers.finish()
            return {name: {**share(), "updates": held.updates} for name, share in shares.items()}
        finally:
            writers.end()

    def _source(self, name: str, request: Mapping[str, Any], capture: Capture, extra: Any) -> ShareSource:
        return ShareSource(
            self._specs[name],
            request["optimizer"],
            capture,
            int(request["parts"]),
            extra,
            bool(request["delta"]),
            self._server,
            self._servers,
        )

    def fill(self, path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Empty tables, and read this server's rows of a checkpoint."""
        checkpoint = Checkpoint(path)
        share = share_of(self._server, self._servers)
        for name, request in tables.items():
            table = self._store.table(name)
            table.clear()
            for rows in checkpoint.parts(name, share):
                table.load(with_state(rows, request["initial"], bool(request["keep"])))
            if request["extra"]:
                extra = read_extras(path, checkpoint.manifest.tables[name].extras, share)
                if extra:
                    table.load_extra(extra)


def _write_unused(folder: Path, name: str, arrays: Mapping[str, Stored], pace: Throttle) -> FileEntry:
    """Write a file by this name, or by another if an earlier save has left one."""
    stem = name.removesuffix(".safetensors")
    if url_of(folder) is not None:  # where a new object replaces the one of its name
        return write_arrays(folder, f"{stem}.{secrets.token_hex(4)}.safetensors", arrays, pace)
    for attempt in itertools.count(1):
        try:
            return write_arrays(folder, name, arrays, pace)
        except FileExistsError:
            if attempt == 1000:
                raise
            name = f"{stem}.repeat-{attempt}.safetensors"
    raise AssertionError("unreachable: the loop does not end")
