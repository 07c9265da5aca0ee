"""`Contents`: what a checkpoint of another system has, in Karvan's terms; its rows are read in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from karvan.store import Rows
from karvan.store.types import Counts, Keys, Vectors

Advance: TypeAlias = Callable[[int], None]  # called with a number of bytes that have been read

PIECE_ROWS = 1 << 16  # rows that are read together, at most
PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class ForeignTable:
    """A table: each row has `state` floats of optimizer state, of the kind `optimizer`; None has none."""

    name: str
    dim: int
    dtype: str
    optimizer: str | None
    state: int
    rows: int


@dataclass
class Contents(ABC):
    """A checkpoint of another system; everything but the rows has been read and checked.

    state: the tree of state of Karvan's checkpoint. notes: what the user has to know of the import, for
    example what was not imported and why.
    """

    system: str
    source: Path
    step: int
    tables: dict[str, ForeignTable] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    @abstractmethod
    def bytes(self) -> int:
        """How many bytes `rows` will read."""

    @abstractmethod
    def rows(self, advance: Advance) -> Iterator[tuple[str, Rows]]:
        """All rows in pieces, each with the name of its table, in any order."""


def make_rows(keys: Keys, vectors: Vectors, state: Vectors, last_steps: Counts) -> Rows:
    """Rows of another system, which does not count uses: each was used at least once."""
    return Rows(
        np.ascontiguousarray(keys),
        np.ascontiguousarray(vectors),
        np.ascontiguousarray(state),
        np.ones(len(keys), np.uint32),
        last_steps,
    )
