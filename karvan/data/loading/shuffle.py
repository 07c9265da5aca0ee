"""Shuffling: an epoch's order of blocks, and of the records inside each.

A *block* is a run of records that is read at once, and mostly by one rank (see `rank_shares.py`). Without
shuffling it is a split. With it, the splits are shuffled, and a block is made of consecutive ones with about
`shuffle` records together, whose records are permuted by (seed, epoch, block number). That is the shuffle
buffer: bounded by `shuffle`, the same on every machine, and the position in it is one number, so that reading
can stop and resume anywhere.

Where splits are larger than `shuffle`, a block is one of them, or a part of a very large one, and its records
are permuted within windows of `shuffle`. So blocks do not become small, and slow, because `shuffle` is small.

Records of different blocks mix only as far as the splits do. Splits much smaller than `shuffle` mix better
and read worse, because file formats decode whole row groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from karvan.data.loading.splits import (
    FEWEST_RECORDS_PER_BLOCK,
    cut,
    default_split_records,
    permutation,
    shuffled,
)
from karvan.data.source import Part, Split


@dataclass(frozen=True, slots=True)
class Block:
    """Splits that are read together; `number` counts the blocks of an epoch."""

    number: int
    splits: tuple[Split, ...]

    @property
    def records(self) -> int:
        """The records of all splits."""
        return sum(split.count for split in self.splits)


def blocks(splits: Iterable[Split], records: int) -> list[Block]:
    """Group consecutive splits into blocks of at least `records` records; the last one may be smaller.

    Inside a block the splits are sorted and joined where they touch, so that they are read in few pieces.
    """
    return [Block(number, group) for number, group in enumerate(_groups(splits, records))]


def _groups(splits: Iterable[Split], records: int) -> Iterator[tuple[Split, ...]]:
    group: list[Split] = []
    held = 0
    for split in splits:
        group.append(split)
        held += split.count
        if held >= records:
            yield _joined(group)
            group, held = [], 0
    if group:
        yield _joined(group)


def _joined(splits: Sequence[Split]) -> tuple[Split, ...]:
    joined: list[Split] = []
    for split in sorted(splits):
        last = joined[-1] if joined else None
        if last is not None and (last.path, last.first + last.count) == (split.path, split.first):
            joined[-1] = Split(last.path, last.first, last.count + split.count)
        else:
            joined.append(split)
    return tuple(joined)


def _evenly(split: Split, most: int) -> Iterator[Split]:
    pieces = -(-split.count // most)
    bounds = [number * split.count // pieces for number in range(pieces + 1)]
    for first, end in pairwise(bounds):
        yield Split(split.path, split.first + first, end - first)


class ShufflePlan:
    """The order of a data set's records in every epoch, a pure function of the parts and these settings."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        shuffle: int = 0,
        seed: int = 0,
        split_records: int | None = None,
        group_records: int | None = None,
    ) -> None:
        self.shuffle = int(shuffle)
        self.seed = int(seed)
        if split_records is None:
            split_records = default_split_records(parts, shuffle, group_records)
        self.split_records = int(split_records)
        self._splits = cut(parts, self.split_records)
        self._parts = list(parts)
        self.records = sum(part.records for part in self._parts)
        self.blocks = lru_cache(maxsize=2)(self._blocks)

    def _blocks(self, epoch: int) -> list[Block]:
        if not self.shuffle:
            return blocks(self._splits, 1)
        splits = shuffled(self._splits, self.seed, epoch)
        if self.split_records <= self.shuffle:
            return blocks(splits, self.shuffle)
        most = max(self.shuffle, FEWEST_RECORDS_PER_BLOCK)
        return blocks((part for split in splits for part in _evenly(split, most)), 1)

    def order(self, epoch: int, block: Block) -> npt.NDArray[np.int64]:
        """The order of the block's records, if they are shuffled."""
        window = self.shuffle if self.split_records > self.shuffle else None
        return permutation(block.records, self.seed, epoch, block.number, window=window)

    def settings(self) -> dict[str, Any]:
        """What a position is valid for, JSON-able. Names of folders do not count: a data set may be moved."""
        return dict(self._settings)

    @property
    def parts(self) -> int:
        """How many parts the source has."""
        return len(self._parts)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        names = "\n".join(f"{part.path.rsplit('/', 1)[-1]} {part.records}" for part in self._parts)
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "split_records": self.split_records,
            "parts": self.parts,
            "records": self.records,
            "names": hashlib.sha256(names.encode()).hexdigest()[:16],
        }
