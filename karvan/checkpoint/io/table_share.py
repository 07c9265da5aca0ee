"""A rank's share of a checkpoint: its files of every table, and the merged shares of all ranks.

A rank divides all hashes into equal parts, a power of two by its number of rows, and writes those that
overlap the hashes it owns. A single process owns all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.format.hash_ranges import Range, pieces, share_of
from karvan.checkpoint.format.manifest import PartEntry, TableEntry
from karvan.checkpoint.format.safetensors_file import FileEntry, Stored, stored
from karvan.checkpoint.format.table_arrays import file_name, folder_of, to_arrays
from karvan.checkpoint.format.table_extras import Extra
from karvan.checkpoint.io.throttle import Throttle
from karvan.checkpoint.object_store.files import make_folder
from karvan.store import Capture, Rows, TableSpec

# Writes arrays to a file of that name, and calls the first argument with its entry once it is written.
Put: TypeAlias = Callable[[Callable[[FileEntry], None], str, Mapping[str, Stored]], None]


@dataclass(frozen=True)
class ShareSource:
    """A table as it was when it was captured, and how this rank writes it."""

    spec: TableSpec
    optimizer: str | None
    capture: Capture
    parts: int  # of all hashes
    extra: Extra
    delta: bool
    rank: int
    ranks: int


def put_table(
    source: ShareSource,
    folder: Path,
    put: Put,
    pace: Throttle,
    working: Callable[[], None] = lambda: None,
) -> Callable[[], dict[str, Any]]:
    """Write this rank's files of a table; the result describes them in JSON, once they are written.

    working: called after each part.
    """
    name, table_folder = source.spec.name, folder_of(source.spec.name)
    make_folder(folder / table_folder)
    erased = np.unique(source.capture.erased(name)) if source.delta else None
    mine = pieces(source.parts, share_of(source.rank, source.ranks))
    entries: dict[int, PartEntry] = {}
    extra: list[FileEntry] = []
    state_size = 0

    def file(what: str) -> str:
        return f"{table_folder}/{file_name(what, source.rank, source.ranks)}"

    def put_part(part: int, range_: Range, rows: Rows) -> None:
        removed = None if erased is None else erased[range_.has(erased)]
        arrays = to_arrays(rows, removed, source.spec.dtype)
        count, removed_count = len(rows.keys), 0 if removed is None else len(removed)

        def note(made: FileEntry) -> None:
            entries[part] = PartEntry(**asdict(made), rows=count, erased=removed_count, first=range_.first)

        put(note, file(f"part-{part:05d}-of-{source.parts:05d}"), arrays)

    for part in range(max(mine) + 1):  # a capture is read from the beginning
        with pace.turn():
            rows = source.capture.part(name, part)
        if part in mine:
            state_size = rows.state.shape[1]
            put_part(part, mine[part], rows)
        working()
    if source.extra:
        put(extra.append, file("extra"), {key: stored(array) for key, array in source.extra.items()})
    return lambda: {
        "state": state_size,
        "parts": [asdict(entries[part]) for part in sorted(entries)],
        "extra": asdict(extra[0]) if extra else None,
    }


def joined(
    folder: Path, spec: TableSpec, optimizer: str | None, shares: Sequence[Mapping[str, Any]]
) -> TableEntry:
    """The entry of a table, from the shares that ranks have reported, in the order of ranks."""
    sizes = {share["state"] for share in shares}
    if len(sizes) > 1:
        raise CheckpointError.mismatch(
            folder, f"table '{spec.name}' with the same size of optimizer state on all ranks", sorted(sizes)
        )
    parts = [PartEntry(**part) for share in shares for part in share["parts"]]
    extras = [share["extra"] and FileEntry(**share["extra"]) for share in shares]
    updates = [share.get("updates") for share in shares]
    return TableEntry(
        dim=spec.dim,
        dtype=spec.dtype,
        state=sizes.pop(),
        optimizer=optimizer,
        admit=list(spec.admit),
        evict=list(spec.evict),
        init=list(spec.init),
        seed=spec.seed,
        rows=sum(part.rows for part in parts),
        parts=parts,
        extras=extras if any(extras) else [],
        updates=updates if any(updates) else [],
    )
