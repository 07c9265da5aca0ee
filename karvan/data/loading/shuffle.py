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
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from karvan.data.source import Part, Split

# Cuts data into splits, in an order that is the same everywhere.
#
# Splits are cut by records, not by files, so one huge file and a thousand small ones are divided equally
# well. The order of an epoch is a pure function of (seed, epoch). It is computed here, not by numpy's
# generators, because positions in checkpoints depend on it and numpy may change its streams between
# versions.


MOST_RECORDS_PER_SPLIT = 65_536
FEWEST_RECORDS_PER_BLOCK = 8_192
"""Reading a smaller block costs about as much as reading one of this size."""
FEWEST_SPLITS = 64

T = TypeVar("T")
Words = npt.NDArray[np.uint64]


def cut(parts: Iterable[Part], records_per_split: int) -> list[Split]:
    """Tile every part with splits of `records_per_split` records; the last of a part may be shorter."""
    if records_per_split < 1:
        raise ValueError(f"A split needs at least 1 record, but records_per_split is {records_per_split}.")
    return [
        Split(part.path, first, min(records_per_split, part.records - first))
        for part in parts
        for first in range(0, part.records, records_per_split)
    ]


def default_split_records(parts: Iterable[Part], shuffle: int, group_records: int | None = None) -> int:
    """How many records a split has by default.

    It depends on the data alone, never on the number of ranks: a position must mean the same for any number.
    Small data is cut finer, so that a shuffle mixes well, and ranks advance through unshuffled data at the
    same pace. But a small shuffle does not make splits small. Files whose records must be decoded in groups
    are read in complete groups, because smaller splits would decode each group many times.
    """
    if group_records:
        return group_records
    total = sum(part.records for part in parts)
    finest = max(1, -(-total // FEWEST_SPLITS))
    target = max(shuffle, FEWEST_RECORDS_PER_BLOCK) if shuffle else finest
    return min(MOST_RECORDS_PER_SPLIT, finest, target)


def shuffled(items: Sequence[T], *seeds: int) -> list[T]:
    """The items in the order that the seeds, for example (seed, epoch), determine."""
    return [items[i] for i in permutation(len(items), *seeds)]


def check_rank(rank: int, world_size: int) -> None:
    """Raise unless 0 <= rank < world_size."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"A rank must be from 0 to world_size - 1, but rank is {rank} and world_size is {world_size}."
        )


def permutation(count: int, *seeds: int, window: int | None = None) -> npt.NDArray[np.int64]:
    """A permutation of 0 … count - 1 that depends on nothing but the seeds.

    Numbers are sorted by a hash of (seeds, number), made of SplitMix64 steps; equal hashes keep their order.
    With a `window`, each run of that many numbers is sorted separately.
    """
    if window == 1:
        return np.arange(count)
    state = np.zeros(1, dtype=np.uint64)
    for seed in seeds:
        state = _mix(state ^ _mix(np.asarray([seed % 2**64], dtype=np.uint64)))
    keys = _mix(state + np.arange(count, dtype=np.uint64))
    if window is None or window >= count:
        return _sorted(keys)
    last = count - count % window
    full = _sorted(keys[:last].reshape(-1, window)) + np.arange(0, last, window)[:, None]
    return np.concatenate([full.reshape(-1), last + _sorted(keys[last:])])


def _sorted(keys: Words) -> npt.NDArray[np.int64]:
    order: npt.NDArray[np.int64] = np.argsort(keys, kind="stable", axis=-1).astype(np.int64, copy=False)
    return order


def _mix(words: npt.NDArray[Any]) -> Words:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


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
    buffered = 0
    for split in splits:
        group.append(split)
        buffered += split.count
        if buffered >= records:
            yield _joined(group)
            group, buffered = [], 0
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
