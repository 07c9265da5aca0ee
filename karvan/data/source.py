"""`Source`: the protocol of finite data that can be read repeatedly.

A source consists of parts (files, or one array), each with a known number of records in a fixed order. A
`Split` is a run of records of one part; it is how work on a data set is divided, handed out and resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from karvan.data.errors import DataError


@dataclass(frozen=True, order=True, slots=True)
class Part:
    """A file, or its counterpart in memory, and how many records it has.

    Args:
        path: The path of the file.
        records: How many records it has.

    Example:
        >>> kv.data.Part("a.parquet", 1000)
        Part(path='a.parquet', records=1000)
    """

    path: str
    records: int


@dataclass(frozen=True, order=True, slots=True)
class Split:
    """Records `first` to `first + count` of a part.

    Args:
        path: The path of the part.
        first: The index of the first record, from 0.
        count: How many records.

    Example:
        >>> kv.data.Split("a.parquet", first=0, count=100)
        Split(path='a.parquet', first=0, count=100)
    """

    path: str
    first: int
    count: int


def require_inside(split: Split, records: int) -> None:
    """Raise a DataError unless the part has all records of a split."""
    first, end = split.first, split.first + split.count
    if not 0 <= first <= end <= records:
        raise DataError(f"Records {first} to {end} were requested, but there are {records}.", path=split.path)


class Source(Protocol):
    """The interface of finite data that can be read any number of times, on several threads at once.

    A source consists of parts (files, or one array), each with a known number of records in a fixed order.
    The page "Add a data format" shows how to write one.

    Example:
        >>> source = kv.data.open_frame({"user": [7, 8, 9]})
        >>> split = kv.data.Split("memory", first=1, count=2)
        >>> [batch.num_rows for batch in source.read(split)]
        [2]
    """

    @property
    def schema(self) -> pa.Schema:
        """The columns of every part."""

    def parts(self) -> list[Part]:
        """List all parts, in the order in which they are read.

        Returns:
            The parts.
        """

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """Read the records of a split in order, in pieces of any size.

        Args:
            split: The split.

        Returns:
            An iterator of record batches.
        """
