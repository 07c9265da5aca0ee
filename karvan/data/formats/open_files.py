"""`open_files`: the source of files of any format."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from karvan.argument_checks import listed
from karvan.data.errors import DataError, located
from karvan.data.formats.arrow_ipc import IpcSource
from karvan.data.formats.base import FileSource
from karvan.data.formats.csv import CsvSource
from karvan.data.formats.orc import OrcSource
from karvan.data.formats.parquet import ParquetSource
from karvan.data.formats.paths import Files, PathLike, find
from karvan.data.formats.recordio import RecordIOSource
from karvan.data.formats.tfrecord import TFRecordSource, is_tfrecord
from karvan.data.source import Part, Split

# Hive partitions: folders such as `day=2026-01-31/hour=07`, whose names are columns of the files inside.
#
# Only folders below the path that is read count, or those from the first wildcard of a glob on: reading
# `clicks` or `clicks/day=*/*.parquet` gives the column `day`, `clicks/day=2026-01-31` does not. They are
# columns only if all files are in folders with the same keys. A column is int64 if all of its values are
# integers, else string.


_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile("-?[0-9]{1,19}")
_INT64 = range(-(1 << 63), 1 << 63)


def partition_columns(files: Files) -> dict[str, pa.Array]:
    """The columns given by the files' folders, one value for each file."""
    all_pairs = [_pairs(below) for below in files.below]
    keys = [key for key, _ in all_pairs[0]]
    if len(set(keys)) != len(keys) or any([key for key, _ in pairs] != keys for pairs in all_pairs):
        return {}
    return {key: _typed([pairs[index][1] for pairs in all_pairs]) for index, key in enumerate(keys)}


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
    values_of_files = [None if value == _NULL else value for value in values]
    if all(
        value is None or (_INTEGER.fullmatch(value) and int(value) in _INT64) for value in values_of_files
    ):
        return pa.array([None if value is None else int(value) for value in values_of_files], pa.int64())
    return pa.array(values_of_files, pa.string())


_FORMATS = {
    "parquet": "parquet", "pq": "parquet", "orc": "orc",
    "arrow": "ipc", "arrows": "ipc", "ipc": "ipc", "feather": "ipc",
    "csv": "csv", "tsv": "tsv", "recordio": "recordio", "rio": "recordio",
    "tfrecord": "tfrecord", "tfrecords": "tfrecord", "tfr": "tfrecord",
}  # fmt: skip
_MAGIC = {
    b"PAR1": "parquet",
    b"ORC": "orc",
    b"ARROW1": "ipc",
    b"\xff\xff\xff\xff": "ipc",
    b"\x04\x03\x02\x01": "recordio",
    b"KVRECORD": "recordio",  # an unsupported format; the error of its source explains what to do
}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
_SHARD = re.compile(r"-\d+-of-\d+$")  # as in clicks.tfrecord-00000-of-00016

_SOURCES: dict[str, type[FileSource]] = {
    "parquet": ParquetSource,
    "orc": OrcSource,
    "ipc": IpcSource,
    "csv": CsvSource,
    "tsv": CsvSource,
    "recordio": RecordIOSource,
    "tfrecord": TFRecordSource,
}


def open_files(
    paths: PathLike | Iterable[PathLike],
    format: str | None = None,
    columns: Sequence[str] | None = None,
    filesystem: fs.FileSystem | None = None,
    *,
    partitions: bool = True,
    **options: Any,
) -> FileSource | PartitionedSource:
    """Open files as a source.

    Folders such as `day=2026-01-31` become columns.

    Args:
        paths: A path, folder, glob or URL, or several.
        format: "parquet", "orc", "ipc", "csv", "tsv", "tfrecord" or "recordio"; by default found from the
            files' extension or first bytes.
        columns: The columns to read; by default all.
        filesystem: A pyarrow file system that has the files; by default found from the URL.
        partitions: Whether names of folders become columns.
        **options: Options of the format.

    Returns:
        The source.

    Raises:
        DataError: There are no such files, or they cannot be read.
        ValueError: The format is unknown.

    Example:
        >>> written = kv.data.synthetic.ClickLog(users=10, items=10).write("log", 50)
        >>> source = kv.data.open_files("log")
        >>> [part.records for part in source.parts()]
        [50]
    """
    files = find(paths, filesystem)
    if format is None:
        format = _common_format(files)
    if format not in _SOURCES:
        raise ValueError(f"There is no format {format!r}; there are: {listed(format, _SOURCES)}")
    if format == "tsv":
        options.setdefault("delimiter", "\t")
    make = _SOURCES[format]
    _check_options(format, make, options)
    partition_values = partition_columns(files) if partitions else {}
    if not partition_values:
        return make(files, columns, **options)
    source = make(files, **options)
    if both := [name for name in partition_values if name in source.names]:
        raise DataError(
            "Both the file and the names of its folders have the column; partitions=False reads the file's.",
            path=files.paths[0],
            column=both[0],
        )
    if columns is None:
        return PartitionedSource(source, files, partition_values)
    inside = [name for name in columns if name not in partition_values]
    if not inside:
        raise DataError("At least one column must be in the files, but all are names of their folders.")
    requested = {name: partition_values[name] for name in columns if name in partition_values}
    return PartitionedSource(make(files, inside, **options), files, requested)


def read_records(
    paths: PathLike | Iterable[PathLike], format: str | None = None, filesystem: fs.FileSystem | None = None
) -> Iterator[bytes]:
    """Read all records of TFRecord or RecordIO files as they were written, in order.

    Args:
        paths: A path, folder, glob or URL, or several.
        format: "tfrecord" or "recordio"; by default found from the files.
        filesystem: A pyarrow file system that has the files.

    Returns:
        An iterator of bytes.

    Raises:
        DataError: A file is damaged.

    Example:
        >>> with kv.data.TFRecordWriter("two.tfrecord") as writer:
        ...     writer.write(b"one")
        ...     writer.write(b"two")
        >>> list(kv.data.read_records("two.tfrecord"))
        [b'one', b'two']
    """
    source = open_files(paths, format, filesystem=filesystem, partitions=False, content="bytes")
    for part in source.parts():
        for batch in source.read(Split(part.path, 0, part.records)):
            yield from batch.column("record").to_pylist()


def _check_options(format: str, make: type[FileSource], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(make).parameters.values()
    allowed = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if unknown := [name for name in options if name not in allowed]:
        choices = listed(unknown[0], [*allowed, "partitions"])
        raise ValueError(f"There is no option '{unknown[0]}' for {format}; there are: {choices}")


def _common_format(files: Files) -> str:
    formats = [(_format(files.filesystem, path), path) for path in files.paths]
    first = formats[0][0]
    for other, path in formats:
        if other != first:
            raise DataError(
                f"Expected {first}, as {files.paths[0]} is, but this is {other}. "
                "Name the files of one format.",
                path=path,
            )
    return first


def _format(filesystem: fs.FileSystem, path: str) -> str:
    name = _SHARD.sub("", path.lower())
    for ending in _COMPRESSIONS:
        name = name.removesuffix(ending)
    name = _SHARD.sub("", name)
    format_ = _FORMATS.get(name.rpartition(".")[2])
    if format_ is not None:
        return format_
    with located(path), filesystem.open_input_stream(path, compression=None) as file:
        start = file.read(12)
    for magic, format_ in _MAGIC.items():
        if start.startswith(magic):
            return format_
    if is_tfrecord(start):
        return "tfrecord"
    if start.lstrip()[:1] in (b"{", b"["):
        raise DataError(
            "JSON is not supported as a format. Read lines of JSON by pyarrow.json.read_json(FILE), and "
            "give the table to kv.data.read in place of a path. To read many files again and again, "
            "write them as Parquet.",
            path=path,
        )
    raise DataError(
        "Neither its name nor its first bytes show the format of the file: pass format=, which may be "
        f"{', '.join(sorted(set(_FORMATS.values())))}.",
        path=path,
    )
