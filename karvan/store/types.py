"""Types of the store protocol: tables, keys, rows, lookups and gradients of distinct keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from karvan import _native

Keys: TypeAlias = NDArray[np.int64]
Vectors: TypeAlias = NDArray[np.float32]
Counts: TypeAlias = NDArray[np.uint32]
Rule: TypeAlias = _native.Rule
FeatureSpec: TypeAlias = _native.FeatureSpec
_LIMITED = ("lru", "lfu")  # policies whose number is a number of rows


@dataclass(frozen=True)
class TableSpec:
    """A table, in the terms of the native core."""

    name: str
    dim: int
    dtype: str
    init: tuple[str, float, float, float, float]
    admit: tuple[str, float, int]
    evict: tuple[str, float, int]
    seed: int
    shards: int

    def share(self, holder: int, holders: int) -> TableSpec:
        """The spec for one of several holders, whose policy allows its part of the rows, at least one."""
        kind, value, every = self.evict
        if kind not in _LIMITED:
            return self
        part = int(value) * (holder + 1) // holders - int(value) * holder // holders
        return replace(self, evict=(kind, float(max(1, part)), every))

    def initial_vectors(self, keys: Keys) -> Vectors:
        """The vectors with which the rows of these keys start, before rounding to `dtype`."""
        vectors = np.empty((len(keys), self.dim), dtype=np.float32)
        _native.initialise(*self.init, self.seed, self.name, np.ascontiguousarray(keys), vectors)
        return vectors


class Rows(NamedTuple):
    """Rows with all they have, in the order of their keys' hashes: what snapshots hold and loads take."""

    keys: Keys
    vectors: Vectors
    state: Vectors
    counts: Counts
    last_steps: Counts


class Found(NamedTuple):
    """The result of a lookup of distinct keys: vectors, and the table's version for the push that follows."""

    vectors: Vectors
    version: int


class Push(NamedTuple):
    """Gradients of one lookup's distinct keys, and the table's version at that lookup."""

    keys: Keys
    gradients: Vectors
    version: int


class StalenessStats(NamedTuple):
    """Staleness of training lookups: the number of batches between lookup and applied gradient.

    total: the sum over all lookups so far; most: the largest.
    """

    lookups: int = 0
    total: int = 0
    most: int = 0


class Gradients(Protocol):
    """The gradients of a backward pass, summed by key; each method returns a value for each table's slot."""

    def finite(self) -> list[bool]:
        """Whether a table's gradients have neither infinities nor NaNs."""

    def touched(self) -> list[bool]:
        """Whether any key of a table has a gradient."""


class GradientFlags:
    """Which tables have gradients, and which of these are finite, by the tables' slots."""

    def __init__(self, finite: list[bool], touched: list[bool]) -> None:
        self._finite = finite
        self._touched = touched

    def finite(self) -> list[bool]:
        """See `Gradients.finite`."""
        return self._finite

    def touched(self) -> list[bool]:
        """See `Gradients.touched`."""
        return self._touched
