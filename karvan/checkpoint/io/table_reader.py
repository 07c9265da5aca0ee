"""Reads the rows of a table from a checkpoint and those it builds on, however they are divided into parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from karvan.activity import activity
from karvan.checkpoint.errors import DamagedCheckpointError
from karvan.checkpoint.format.hash_ranges import WHOLE, Range
from karvan.checkpoint.format.manifest import TableEntry
from karvan.checkpoint.format.table_arrays import join, overlay, read_part, select
from karvan.store import Rows
from karvan.store.exchange.key_sharding import hashes_of
from karvan.store.types import Keys


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
            part = entry.parts[bisect_right(entry.parts, upper, key=lambda one: one.first) - 1]
            rows, erased = read_part(folder, entry, part, delta=delta)
            if (found := rows.keys == keys).any():
                return select(rows, found)
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
        begin = bisect_right(self.ranges, hashes.first, key=lambda one: one.first) - 1
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
