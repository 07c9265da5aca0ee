"""`Source`: the protocol of finite data that can be read repeatedly.

A source consists of parts (files, or one array), each with a known number of records in a fixed order. A
`Split` is a run of records of one part; it is how work on a data set is divided, handed out and resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True, order=True, slots=True)
class Part:
    """A file, or its counterpart in memory, and how many records it has."""

    path: str
    records: int


@dataclass(frozen=True, order=True, slots=True)
class Split:
    """Records `first` to `first + count` of a part."""

    path: str
    first: int
    count: int


class Source(Protocol):
    """Records that can be read from anywhere, any number of times, on several threads at once."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of every part."""

    def parts(self) -> list[Part]:
        """All parts, in the order in which they are read."""

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The records of a split in order, in pieces of any size."""
