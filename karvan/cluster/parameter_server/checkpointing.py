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
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from karvan.checkpoint import Checkpoint
from karvan.checkpoint.atomic_folder import try_writing
from karvan.checkpoint.checkpoint import fill_table, with_state
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.manifest import Manifest, pieces, share_of
from karvan.checkpoint.safetensors_file import FileEntry, Stored, Throttle, Writers, write_arrays
from karvan.checkpoint.table_files import (
    Extra,
    ShareSource,
    folder_of,
    join,
    own_extra,
    put_table,
    read_extras,
)
from karvan.cluster.parameter_server.row_updates import ServerTables
from karvan.job.checkpoint_url import local_path, shown, url_of, without_secrets
from karvan.native import _native
from karvan.protocol.parameter_server import CaptureHead
from karvan.store import Capture, Rows
from karvan.store.types import Keys
from karvan.wire import RefusedError

# `UpdateCounts`: how many updates of each trainer a parameter server's tables contain.
#
# With `on_server_loss: reload` a server that restarts has the rows of a checkpoint, and all updates since
# that checkpoint are lost. Every server counts the pushes it has applied, by store and trainer. A capture
# takes the counts along with the rows, the share of a checkpoint carries them in the manifest, and a server
# that is restored from the checkpoint continues with them. So the counts always describe the rows: a trainer
# that knows how many pushes it has made subtracts what each server contains, and the difference is what is
# lost.
#
# Pushes are numbered within one run of the trainers, so a run does not use the counts in a checkpoint of
# another run; its own start at zero.


class UpdateCounts:
    """Applied pushes, by store and trainer, of one run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._counts: dict[int, Counter[int]] = {}

    def add(self, store: int, trainer: int) -> None:
        """A push was applied."""
        self._counts.setdefault(store, Counter())[trainer] += 1

    def of(self, store: int) -> dict[str, int]:
        """By trainer, for JSON."""
        return {str(trainer): count for trainer, count in self._counts.get(store, {}).items()}

    def record(self, store: int) -> dict[str, Any]:
        """The counts, as a share of a checkpoint stores them."""
        return {"run": self._run, "store": store, "trainers": self.of(store)}

    def restore(self, manifest: Manifest, server: int, servers: int) -> None:
        """Continue with the counts of this server's share of a checkpoint."""
        self._counts = {}
        for table in manifest.tables.values():
            if len(table.updates) != servers:
                continue
            match table.updates[server]:
                case {"run": self._run, "store": int(store), "trainers": Mapping() as trainers}:
                    self._counts[store] = Counter({int(name): int(n) for name, n in trainers.items()})


# `SavedShare`: a restored server's rows of the checkpoint it was restored from, in place of a lost capture.
#
# If a server dies between the capture of a save and the end of its writing, the captured rows are lost.
# The server that replaces it has the rows of the checkpoint before, and perhaps updates that came after the
# capture, which the new checkpoint must not have. So it writes what it was restored from: the rows that it
# would have had at the capture, with the same updates lost.


class Restored(NamedTuple):
    """What a server was restored from; no checkpoint if nothing had been saved.

    tables: for each table, whether the checkpoint's optimizer state is used (`keep`), and the `initial` one.
    """

    checkpoint: Checkpoint | None
    tables: Mapping[str, Mapping[str, Any]]
    updates: UpdateCounts  # of the checkpoint


class SavedShare(Capture):
    """The rows that a server of these tables was restored from.

    requests: from the save's request, see `SharedStore.save_tables`. A delta must build on the checkpoint
    that the server was restored from, and is then empty.
    """

    def __init__(
        self, tables: ServerTables, restored: Restored, requests: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._tables = tables
        self._checkpoint = restored.checkpoint
        self._restored_tables = restored.tables
        self._requests = requests
        self._share = share_of(tables.index, tables.count)
        self.versions = {}
        restored_id = None if self._checkpoint is None else self._checkpoint.manifest.id
        for name, request in requests.items():
            if request["delta"] and request["base"] != restored_id:
                raise RefusedError(
                    f"expected to save what changed in table '{name}' since the checkpoint that this server "
                    "was restored from, got another one: this save fails, and the next one is a full one."
                )

    @override
    def part(self, table: str, part: int) -> Rows:
        mine = pieces(int(self._requests[table]["parts"]), self._share)
        restored = self._restored_tables.get(table, {"initial": (), "keep": False})
        rows_: list[Rows] = []
        if part in mine and self._saved(table) and not self._requests[table]["delta"]:
            assert self._checkpoint is not None
            rows_ = list(self._checkpoint.parts(table, mine[part]))
        rows = join(rows_) if rows_ else _no_rows(self._tables.spec(table).dim)
        return with_state(rows, restored["initial"], bool(restored["keep"]) and bool(rows_))

    @override
    def erased(self, table: str) -> Keys:
        return np.empty(0, np.int64)

    def extra(self, table: str) -> Extra:
        """What the table has besides rows."""
        if not self._saved(table):
            return {}
        assert self._checkpoint is not None
        files = self._checkpoint.manifest.tables[table].extras
        extras = read_extras(self._checkpoint.path, files, self._share)
        return own_extra(extras, self._tables.index, self._tables.count)

    @override
    def close(self) -> None:
        pass

    def _saved(self, table: str) -> bool:
        return self._checkpoint is not None and table in self._checkpoint.manifest.tables


def _no_rows(dim: int) -> Rows:
    none = np.empty(0, np.uint32)
    vectors = np.empty((0, dim), np.float32)
    return Rows(np.empty(0, np.int64), vectors, np.empty((0, 0), np.float32), none, none)


# Where a parameter server may write: below the job's checkpoint folder, and nowhere else.
#
# Trainers name the folder of each save. A server does not trust them: a path that leads out of its own
# folder, by `..` or through a symbolic link, is refused, so a caller cannot make it write into other folders
# of the user who runs the job. Links inside of a save's folder must not lead out either. Rows are read from
# any checkpoint that the server's user may read (`fill`), because a run may load another run's checkpoint;
# only `restore`, for a server that replaces a lost one, is limited to the folder.


class ServerFolder:
    """The checkpoint folder of server `name`; None: it may not write at all."""

    def __init__(self, name: str, root: str | os.PathLike[str] | None) -> None:
        self._name = name
        self._root = Path(os.path.abspath(local_path(root))) if root else None

    def target(self, folder: str, tables: Iterable[str]) -> Path:
        """The folder of a save, with links resolved; a ValueError if it, or a table's, leads outside."""
        step_folder = self._inside(folder)
        if step_folder == self._existing_root():
            raise self._refusal(folder)
        for table in tables:
            path = step_folder / folder_of(table)
            if not path.resolve().is_relative_to(step_folder):
                raise self._refusal(str(path))
        return step_folder

    def check(self, folder: str) -> Path:
        """The folder of a run, with links resolved; a ValueError says why this server cannot save into it."""
        step_folder = self._inside(folder)
        if url_of(step_folder) is not None:
            try:
                try_writing(step_folder)
            except CheckpointError as error:
                raise ValueError(f"{self._name}: {error}") from error
            return step_folder
        if not step_folder.is_dir():
            raise ValueError(
                f"{self._name} expected to see {folder} of the trainer, got nothing: checkpoints must be "
                "on storage that all roles share."
            )
        if not os.access(step_folder, os.W_OK | os.X_OK):
            raise ValueError(f"{self._name} expected to be allowed to write into {folder}, but it is not.")
        return step_folder

    def _inside(self, folder: str) -> Path:
        if not isinstance(folder, str) or not folder or "\0" in folder:
            raise ValueError(f"{self._name} expected the path of a folder, got {folder!r}.")
        if "://" in folder and url_of(self._existing_root()) is None:
            raise self._refusal(folder)
        path = local_path(folder).resolve()
        if not path.is_relative_to(self._existing_root()):
            raise self._refusal(folder)
        return path

    def _existing_root(self) -> Path:
        if self._root is None:
            raise ValueError(
                f"{self._name} has no checkpoint folder, so it cannot save: set `checkpoints` of the job, or "
                "start it with `karvan role parameter-server --checkpoints FOLDER` (KARVAN_CHECKPOINTS)."
            )
        return self._root.resolve()

    def _refusal(self, folder: str) -> ValueError:
        return ValueError(
            f"{self._name} expected a folder below {shown(self._root)}, the job's checkpoint folder, got "
            f"{without_secrets(folder)}. "
            "Save there, or name another folder in `checkpoints` of the job (--checkpoints of `karvan role`)."
        )


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

    def __init__(self, tables: ServerTables) -> None:
        self._tables = tables
        self._lock = threading.Lock()
        self._open: dict[int, _Held] = {}
        self._versions: dict[int, dict[str, int]] = {}  # of captures that a delta may build on

    def capture(
        self, head: CaptureHead, updates: Mapping[str, Any], log: _native.LookupLog | None, trainer: int
    ) -> None:
        """Hold the tables as they are now, under a number; `updates` are those that they contain.

        log: lookups in flight, which are not captured. trainer: which asks for it.
        """
        versions = None
        if head.since is not None:
            if head.since not in self._versions:
                raise ValueError(f"expected a tracked capture, got {head.since}.")
            versions = {name: self._versions[head.since][name] for name in head.tables}
        with self._lock:
            store, tables = self._tables.store, self._tables
            capture = store.capture(head.tables, head.parts, versions, track=head.track, log=log)
            extras = {
                name: own_extra(store.table(name).extra(log), tables.index, tables.count)
                for name in head.tables
            }
            self._open[head.capture] = _Held(capture, extras, updates, trainer)
            if head.track:
                self._versions = {head.capture: dict(capture.versions)}

    def replace_lost(
        self, number: int, tables: Mapping[str, Mapping[str, Any]], store: int, restored: Restored
    ) -> None:
        """For a server that was restored after a capture, and does not have it."""
        if number not in self._open:
            share = SavedShare(self._tables, restored, tables)
            extras = {name: share.extra(name) for name in tables}
            self._open[number] = _Held(share, extras, restored.updates.record(store))

    def close(self, number: int) -> None:
        """Release a capture."""
        with self._lock:
            save = self._open.pop(number, None)
        if save is not None:
            save.capture.close()

    def close_all(self, trainer: int | None = None) -> None:
        """Release all captures, or those of a trainer that is gone."""
        for number, save in list(self._open.items()):
            if trainer is None or save.trainer == trainer:
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
        save = self._open[number]
        if missing := [name for name in tables if name not in save.extras]:
            raise ValueError(f"expected tables that were captured, got '{missing[0]}'.")
        writers = Writers(writer_count, write=_write_unused)
        try:
            shares = {}
            for name, request in tables.items():
                source = ShareSource(
                    self._tables.spec(name),
                    request["optimizer"],
                    save.capture,
                    int(request["parts"]),
                    save.extras[name],
                    bool(request["delta"]),
                    self._tables.index,
                    self._tables.count,
                )
                shares[name] = put_table(source, folder, writers)
            writers.finish()
            return {name: {**share(), "updates": save.updates} for name, share in shares.items()}
        finally:
            writers.end()

    def fill(self, path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Empty tables, and read this server's rows of a checkpoint."""
        checkpoint = Checkpoint(path)
        share = share_of(self._tables.index, self._tables.count)
        for name, request in tables.items():
            table = self._tables.store.table(name)
            fill_table(checkpoint, name, table, share, request)
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
