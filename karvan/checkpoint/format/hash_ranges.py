"""Ranges of key hashes, by which tables are divided over ranks and files.

A range goes by the upper 32 bits of hashes, so that its bounds are whole numbers for any number of ranks.
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
    """The hashes whose upper 32 bits are from `first` on and below `end`."""

    first: int
    end: int

    def overlaps(self, other: Range) -> bool:
        """Whether a hash is in both."""
        return self.first < other.end and other.first < self.end

    def inside(self, other: Range) -> bool:
        """Whether the other one has all of it."""
        return other.first <= self.first and self.end <= other.end

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Which keys have a hash in it."""
        upper = hashes_of(keys) >> np.uint64(32)
        mask: NDArray[np.bool_] = (upper >= np.uint64(self.first)) & (upper < np.uint64(self.end))
        return mask


WHOLE = Range(0, SPACE)


def share_of(rank: int, ranks: int) -> Range:
    """What a rank owns."""
    return Range(first_hash_of(rank, ranks) >> 32, first_hash_of(rank + 1, ranks) >> 32)


def equal_cuts(parts: int) -> list[int]:
    """Where so many equal ranges begin; `parts` is a power of two."""
    return [part * (SPACE // parts) for part in range(parts)]


def between(cuts: Sequence[int]) -> list[Range]:
    """The ranges that begin at these places."""
    return [Range(first, end) for first, end in zip(cuts, [*cuts[1:], SPACE], strict=True)]


def pieces(parts: int, share: Range) -> dict[int, Range]:
    """Those of so many equal parts that have hashes of a share, and what they have of it."""
    width = SPACE // parts
    return {
        part: Range(max(part * width, share.first), min((part + 1) * width, share.end))
        for part in range(share.first // width, -(-share.end // width))
    }
