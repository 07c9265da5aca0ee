"""Which rank owns a key: the one whose range of hashes contains the key's hash."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from karvan.native import _native
from karvan.store.types import Keys

Hashes: TypeAlias = NDArray[np.uint64]


def hashes_of(keys: Keys) -> Hashes:
    """The hashes of csrc/hash/mix.h, whose ranges divide keys between ranks and between files."""
    hashes = np.empty(len(keys), np.uint64)
    _native.mix(np.ascontiguousarray(keys), hashes)
    return hashes


def owners_of(hashes: Hashes, ranks: int) -> NDArray[np.int64]:
    """The rank that owns each hash, as csrc/batch/key_routing.h computes it."""
    half = np.uint64(32)
    return (((hashes >> half) * np.uint64(ranks)) >> half).astype(np.int64)


def first_hash_of(rank: int, ranks: int) -> int:
    """The smallest hash that a rank owns; for `ranks` itself, 2^64."""
    return -(-(rank << 32) // ranks) << 32


def counters_of(first: int, end: int, counters: int) -> slice:
    """The slice of an admission filter's counters that belongs to a range of hashes.

    counters: the filter's size; see csrc/table/admission_filter.h. The range has the hashes whose upper 32
    bits are at least `first` and below `end`.
    """
    blocks = counters // 64
    last = ((end << 32) - 1) * blocks >> 64
    return slice((first * blocks >> 32) * 64, (last + 1) * 64)
