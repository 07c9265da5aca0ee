"""Cuts data into splits, in an order that is the same everywhere.

Splits are cut by records, not by files, so one huge file and a thousand small ones are divided equally well.
The order of an epoch is a pure function of (seed, epoch). It is computed here, not by numpy's generators,
because positions in checkpoints depend on it and numpy may change its streams between versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from karvan.data.source import Part, Split

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
