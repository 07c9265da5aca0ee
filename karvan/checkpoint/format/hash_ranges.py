"""Ranges of key hashes, by which tables are divided over ranks and files.

A range is one of the upper 32 bits of hashes, so that its bounds are integers for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from karvan.store.exchange.key_sharding import first_hash_of, hashes_of
from karvan.store.types import Keys

SPACE = 1 << 32


class Range(NamedTuple):
    """The hashes whose upper 32 bits are at least `first` and below `end`."""

    first: int
    end: int

    def overlaps(self, other: Range) -> bool:
        """Whether a hash is in both."""
        return self.first < other.end and other.first < self.end

    def inside(self, other: Range) -> bool:
        """Whether the other range contains all of it."""
        return other.first <= self.first and self.end <= other.end

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Which keys have a hash in it."""
        upper = hashes_of(keys) >> np.uint64(32)
        mask: NDArray[np.bool_] = (upper >= np.uint64(self.first)) & (upper < np.uint64(self.end))
        return mask


WHOLE = Range(0, SPACE)


def share_of(rank: int, ranks: int) -> Range:
    """The range that a rank owns."""
    return Range(first_hash_of(rank, ranks) >> 32, first_hash_of(rank + 1, ranks) >> 32)


def equal_cuts(parts: int) -> list[int]:
    """The starts of so many equal ranges; `parts` is a power of two."""
    return [part * (SPACE // parts) for part in range(parts)]


def between(cuts: Sequence[int]) -> list[Range]:
    """The ranges that start at these cuts; each ends at the next one."""
    return [Range(first, end) for first, end in zip(cuts, [*cuts[1:], SPACE], strict=True)]


def pieces(parts: int, share: Range) -> dict[int, Range]:
    """Of so many equal parts, those that overlap a share, each with the range they have in common."""
    width = SPACE // parts
    return {
        part: Range(max(part * width, share.first), min((part + 1) * width, share.end))
        for part in range(share.first // width, -(-share.end // width))
    }
