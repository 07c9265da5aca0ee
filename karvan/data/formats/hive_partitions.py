"""Hive partitions: folders such as `day=2026-01-31/hour=07`, whose names are columns of the files inside.

Only folders below the path that is read count, or those from the first wildcard of a glob on: reading
`clicks` or `clicks/day=*/*.parquet` gives the column `day`, `clicks/day=2026-01-31` does not. They are
columns only if all files are in folders with the same keys. A column is int64 if all of its values are
integers, else string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from karvan.data.formats.base import FileSource
from karvan.data.formats.paths import Files
from karvan.data.source import Part, Split

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile("-?[0-9]{1,19}")
_INT64 = range(-(1 << 63), 1 << 63)


def partition_columns(files: Files) -> dict[str, pa.Array]:
    """The columns given by the files' folders, one value for each file."""
    found = [_pairs(below) for below in files.below]
    keys = [key for key, _ in found[0]]
    if len(set(keys)) != len(keys) or any([key for key, _ in pairs] != keys for pairs in found):
        return {}
    return {key: _typed([pairs[index][1] for pairs in found]) for index, key in enumerate(keys)}


class PartitionedSource:
    """The records of a source of files, with the columns of each file's folders."""

    def __init__(self, source: FileSource, files: Files, columns: Mapping[str, pa.Array]) -> None:
        self._source = source
        self.outages = source.outages
        self._columns = dict(columns)
        self._file_numbers = {path: number for number, path in enumerate(files.paths)}

    @property
    def schema(self) -> pa.Schema:
        """The columns of the files, then those of the folders."""
        added = [pa.field(name, values.type) for name, values in self._columns.items()]
        return pa.schema([*self._source.schema, *added])

    @property
    def group_records(self) -> int | None:
        """That of the files."""
        return self._source.group_records

    def first_of_kind(self, name: str) -> str | None:
        """Find the first file in which a column has a kind."""
        return None if name in self._columns else self._source.first_of_kind(name)

    def columns_with_nulls(self) -> frozenset[str]:
        """Name the columns that may have nulls."""
        return self._source.columns_with_nulls()

    def parts(self) -> list[Part]:
        """The files."""
        return self._source.parts()

    def fingerprint(self) -> str:
        """That of the files."""
        return self._source.fingerprint()

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The records of a split in order."""
        schema = self.schema
        for batch in self._source.read(split):
            number = self._file_numbers[split.path]
            added = [pa.repeat(values[number], batch.num_rows) for values in self._columns.values()]
            yield pa.RecordBatch.from_arrays([*batch.columns, *added], schema=schema)

    def __repr__(self) -> str:
        return f"PartitionedSource({self._source!r}, partitions {list(self._columns)})"


def _pairs(below: str) -> list[tuple[str, str]]:
    folders = [folder.partition("=") for folder in below.split("/")[:-1]]
    return [(unquote(key), unquote(value)) for key, equals, value in folders if key and equals]


def _typed(values: Sequence[str]) -> pa.Array:
    known = [None if value == _NULL else value for value in values]
    if all(value is None or (_INTEGER.fullmatch(value) and int(value) in _INT64) for value in known):
        return pa.array([None if value is None else int(value) for value in known], pa.int64())
    return pa.array(known, pa.string())
