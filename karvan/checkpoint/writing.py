"""Writing one checkpoint: what must be of one step is taken at the call, the rest happens on threads.

At the call the tables are captured and the dense state is copied. The saving thread then asks the capture for
one part after the other; a few writing threads take checksums and write, so that some compute while others
wait for the disk. The manifest comes last, then the folder's name.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from karvan.checkpoint import manifest as manifests
from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.files import FileEntry, Stored, stored, write_arrays, write_file
from karvan.checkpoint.folder import HiddenFolder
from karvan.checkpoint.manifest import Base, Manifest, PartEntry, TableEntry
from karvan.checkpoint.pace import Pace
from karvan.checkpoint.pending import Pending, Writers
from karvan.checkpoint.tables import folder_of, part_name, parts_for, parts_of, to_arrays
from karvan.checkpoint.tree import encode
from karvan.embedding import TableHandle
from karvan.store import Capture, Rows, Store
from karvan.store.owners import hashes_of

Versions = dict[str, int]


class Writing:
    """Everything of one step, held until it is written.

    since: the tables' versions of an earlier one, to write only what changed after it (a delta on `base`); a
    ValueError says that this is not known any more, and nothing is held then.
    track: whether tables note what changes, for a delta on this one.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        tables: Mapping[str, TableHandle],
        *,
        step: int,
        metrics: Mapping[str, Any] | None,
        part_bytes: int,
        base: Base | None = None,
        since: Versions | None = None,
        track: bool = False,
    ) -> None:
        self.step = step
        self.base = base
        self._tables = dict(tables)
        self._tree, self._dense = encode(dict(state))
        self._metrics, odd = encode(dict(metrics or {}))
        if odd:
            raise TypeError(
                f"Expected metrics that are numbers or text, got a tensor as '{next(iter(odd))}'."
            )
        self._parts = {name: parts_for(handle, part_bytes) for name, handle in tables.items()}
        self._specs = {name: (handle.optimizer, handle.spec) for name, handle in tables.items()}
        self.versions: Versions = {}
        self._captures: dict[str, Capture] = {}
        try:
            for store, names in _by_store(tables).items():
                asked = None if since is None else {name: since[name] for name in names}
                parts = {name: self._parts[name] for name in names}
                capture = store.capture(names, parts, asked, track=track)
                self._captures |= dict.fromkeys(names, capture)
                self.versions |= capture.versions
            self._extras = {name: handle.engine.store.extra(name) for name, handle in tables.items()}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of what was captured."""
        for capture in self._captures.values():
            capture.close()

    def start(self, target: Path, check: Callable[[], None], after: Callable[[Checkpoint], None]) -> Pending:
        """Write to `target` on threads; `check` runs just before the folder gets its name, `after` later."""
        pace = Pace()
        writers = Writers()

        def work() -> Checkpoint:
            try:
                made = self._write(target, writers, pace, check)
            except OSError as error:
                raise _explained(target, error) from error
            finally:
                writers.end()
                self.close()
            after(made)
            return made

        try:
            return Pending(self.step, work, pace)
        except BaseException:  # no thread to be had
            writers.end()
            self.close()
            raise

    def _write(self, target: Path, writers: Writers, pace: Pace, check: Callable[[], None]) -> Checkpoint:
        hidden = HiddenFolder(target)
        try:
            dense: list[FileEntry] = []
            writers.put(_job(dense.append, hidden.path, "dense.safetensors", self._dense, pace))
            tables = {name: self._put_table(name, hidden.path, writers, pace) for name in self._tables}
            writers.finish()
            manifest = Manifest(
                step=self.step,
                kind="full" if self.base is None else "delta",
                id=secrets.token_hex(16),
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                karvan=version("karvan"),
                base=self.base,
                metrics=self._metrics,
                tables={name: made() for name, made in tables.items()},
                dense=dense[0],
                state=self._tree,
            )
            write_file(hidden.path / manifests.NAME, [memoryview(manifests.to_bytes(manifest))], pace)
            made = Checkpoint(hidden.path)
            hidden.publish(check)
            made.path = target  # where another process may have replaced or removed it by now
        finally:
            hidden.remove()
        return made

    def _put_table(self, name: str, folder: Path, writers: Writers, pace: Pace) -> Callable[[], TableEntry]:
        """Have a table's files written; what is returned tells its entry once they are."""
        optimizer, spec = self._specs[name]
        parts, place = self._parts[name], folder_of(name)
        (folder / place).mkdir(parents=True)
        capture = self._captures[name]
        erased = None if self.base is None else np.unique(capture.erased(name))
        owner = None if erased is None else parts_of(hashes_of(erased), parts)
        entries: dict[int, PartEntry] = {}
        state_size = 0

        def put(part: int, rows: Rows) -> None:
            gone = None if erased is None else erased[owner == part]
            arrays = to_arrays(rows, gone, spec.dtype)
            count, left = len(rows.keys), 0 if gone is None else len(gone)

            def note(file: FileEntry) -> None:
                entries[part] = PartEntry(file.name, file.bytes, file.checksum, rows=count, erased=left)

            writers.put(_job(note, folder, f"{place}/{part_name(part, parts)}", arrays, pace))

        for part in range(parts):
            with pace.turn():
                rows = capture.part(name, part)
            state_size = rows.state.shape[1]
            put(part, rows)
        extra: list[FileEntry] = []
        if self._extras[name]:
            arrays = {key: stored(array) for key, array in self._extras[name].items()}
            writers.put(_job(extra.append, folder, f"{place}/extra.safetensors", arrays, pace))
        return lambda: TableEntry(
            dim=spec.dim,
            dtype=spec.dtype,
            state=state_size,
            optimizer=optimizer,
            admit=list(spec.admit),
            evict=list(spec.evict),
            init=list(spec.init),
            seed=spec.seed,
            rows=sum(entry.rows for entry in entries.values()),
            parts=[entries[part] for part in range(parts)],
            extra=extra[0] if extra else None,
        )


def check_target(target: Path) -> None:
    """Raise if something is there that is no checkpoint, and would be lost."""
    if target.exists() and not (target / manifests.NAME).exists():
        raise CheckpointError.mismatch(target, "a checkpoint to replace, or nothing", "something else")


def _job(
    note: Callable[[FileEntry], None], folder: Path, name: str, arrays: Mapping[str, Stored], pace: Pace
) -> Callable[[], None]:
    return lambda: note(write_arrays(folder, name, arrays, pace))


def _by_store(tables: Mapping[str, TableHandle]) -> dict[Store, list[str]]:
    groups: dict[Store, list[str]] = {}
    for name, handle in tables.items():
        groups.setdefault(handle.engine.store, []).append(name)
    return groups


def _explained(target: Path, error: OSError) -> CheckpointError:
    where = f" at {error.filename}" if error.filename else ""
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what += ", so that nothing was kept of it; the checkpoints that were there are untouched"
    return CheckpointError(target, f"expected to write a checkpoint, got '{what}'{where}.")
