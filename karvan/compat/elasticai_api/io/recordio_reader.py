"""`RecordIOReader`: records of several RecordIO files by their numbers, which count over all files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from karvan.compat.unsupported import UsageError
from karvan.data import Split, open_files


class RecordBlock(NamedTuple):
    """The records of a file: from `start` to `end`, counted over all files."""

    name: str
    start: int
    end: int


class RecordIOReader:
    """Reads records of files, whose numbers begin where those of the file before end."""

    def __init__(self, recordio_files: Sequence[str]) -> None:
        if isinstance(recordio_files, str):
            raise UsageError(f"RecordIOReader expects a list of files, got the text '{recordio_files}'.")
        self._sources = [
            open_files(name, "recordio", partitions=False, content="bytes") for name in recordio_files
        ]
        counts = [sum(part.records for part in source.parts()) for source in self._sources]
        bounds = pairwise(accumulate(counts, initial=0))
        self._blocks = [
            RecordBlock(str(name), *each) for name, each in zip(recordio_files, bounds, strict=True)
        ]

    def read_records(self, start: int, end: int) -> Iterator[bytes]:
        """The records from `start` to `end`."""
        for block, source in zip(self._blocks, self._sources, strict=True):
            first, last = max(start, block.start), min(end, block.end)
            if first < last:
                (part,) = source.parts()
                for batch in source.read(Split(part.path, first - block.start, last - first)):
                    yield from batch.column(0).to_pylist()
