"""Which rank owns a key: the one whose range of hashes has the key's."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from karvan import _native

Keys: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint64]


def hashes_of(keys: Keys) -> Hashes:
    """The mix of csrc/hash/mix.h, by whose ranges keys are shared out, between ranks and between files."""
    hashes = np.empty(len(keys), np.uint64)
    _native.mix(np.ascontiguousarray(keys), hashes)
    return hashes


def owners_of(hashes: Hashes, ranks: int) -> NDArray[np.int64]:
    """The rank that owns each hash, as csrc/batch/key_routing.h has it."""
    half = np.uint64(32)
    return (((hashes >> half) * np.uint64(ranks)) >> half).astype(np.int64)


def first_hash_of(rank: int, ranks: int) -> int:
    """The least hash that a rank owns; for `ranks` itself, 2^64."""
    return -(-(rank << 32) // ranks) << 32


def counters_of(first: int, end: int, counters: int) -> slice:
    """Where an admission filter of so many counters has those of some hashes.

    The hashes are those whose upper 32 bits are from `first` on and below `end`; the filter is that of
    csrc/table/admission_filter.h.
    """
    blocks = counters // 64
    last = ((end << 32) - 1) * blocks >> 64
    return slice((first * blocks >> 32) * 64, (last + 1) * 64)
