"""The files of a table's rows: a share that is written, and rows that are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from karvan.activity import activity
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.format.manifest import WHOLE, PartEntry, Range, TableEntry, pieces, share_of
from karvan.checkpoint.format.safetensors_file import FileEntry, Stored, Throttle, stored
from karvan.checkpoint.format.table_arrays import (
    Extra,
    file_name,
    folder_of,
    join,
    overlay,
    read_part,
    select,
    to_arrays,
)
from karvan.checkpoint.object_store.files import make_folder
from karvan.store import Capture, Rows, TableSpec
from karvan.store.messages import hashes_of
from karvan.store.types import Keys

# Reads the rows of a table from a checkpoint and those it builds on, however they are divided into parts.


class Layer(NamedTuple):
    """A table in one checkpoint of a chain."""

    folder: Path
    entry: TableEntry
    delta: bool


class TableReader:
    """A table in a full checkpoint and the deltas on it, in order."""

    def __init__(self, name: str, layers: Sequence[Layer]) -> None:
        self._layers = list(layers)
        full = layers[0].entry
        for layer in layers[1:]:
            its = layer.entry
            if (its.dim, its.dtype, its.state) != (full.dim, full.dtype, full.state):
                raise DamagedCheckpointError.mismatch(
                    layer.folder,
                    f"table '{name}' as in its base: dim {full.dim}, {full.dtype}, {full.state} of state",
                    f"dim {its.dim}, {its.dtype}, {its.state} of state",
                )

    def parts(self, share: Range = WHOLE) -> Iterator[Rows]:
        """The rows of a share of the hashes, one part of the full checkpoint after the other."""
        full, *deltas = [_Files(layer) for layer in self._layers]
        for range_ in full.ranges:
            if not range_.overlaps(share):
                continue
            overlap = Range(max(range_.first, share.first), min(range_.end, share.end))
            _, rows = full.within(overlap)
            for delta in deltas:
                rows = overlay(rows, *delta.within(overlap))
            activity.advance()
            yield rows

    def row(self, key: int) -> Rows | None:
        """The row of one key; None if it has none."""
        keys = np.array([key & (2**64 - 1)], np.uint64).view(np.int64)
        upper = int(hashes_of(keys)[0]) >> 32
        for folder, entry, delta in reversed(self._layers):
            part = entry.parts[bisect_right(entry.parts, upper, key=lambda part: part.first) - 1]
            rows, erased = read_part(folder, entry, part, delta=delta)
            if (same := rows.keys == keys).any():
                return select(rows, same)
            if (erased == keys).any():
                return None
        return None


class _Files:
    """The parts of a layer; holds the last one that was read, as the next range may start in it."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.ranges = layer.entry.ranges
        self._number = -1
        self._last: tuple[Rows, Keys] | None = None

    def within(self, hashes: Range) -> tuple[Keys, Rows]:
        """Keys that were removed, and rows, of some hashes."""
        erased, rows = [], []
        begin = bisect_right(self.ranges, hashes.first, key=lambda part: part.first) - 1
        for number in range(begin, len(self.ranges)):
            if not self.ranges[number].overlaps(hashes):
                break
            its_rows, its_erased = self._read(number)
            if not self.ranges[number].inside(hashes):
                its_rows = select(its_rows, hashes.has(its_rows.keys))
                its_erased = its_erased[hashes.has(its_erased)]
            rows.append(its_rows)
            erased.append(its_erased)
        return (erased[0], rows[0]) if len(rows) == 1 else (np.concatenate(erased), join(rows))

    def _read(self, number: int) -> tuple[Rows, Keys]:
        if self._last is None or number != self._number:
            self._last = None  # released before the next one is read
            folder, entry, delta = self._layer
            self._last = read_part(folder, entry, entry.parts[number], delta)
            self._number = number
        return self._last


# A rank's share of a checkpoint: its files of every table, and the merged shares of all ranks.
#
# A rank divides all hashes into equal parts, a power of two by its number of rows, and writes those that
# overlap the hashes it owns. A single process owns all of them.


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

        def note(entry: FileEntry) -> None:
            entries[part] = PartEntry(**asdict(entry), rows=count, erased=removed_count, first=range_.first)

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
