"""`FileSource`: what all file formats share.

A file is a sequence of *groups* whose records are counted in advance: row groups of Parquet, stripes of ORC,
record batches of Arrow IPC, runs of lines of CSV, runs of records of TFRecord and RecordIO. A split is read
from the group that contains its first record. Every group is checked against its count, so that damaged files
are errors and not silently shorter.

The reader of a split that ends inside of a group is stored, and the split that follows continues with it:
reading a file in small splits, in order, decodes each group once. Splits in random order decode the group
that they start in from its beginning, so they should be about as long as groups are.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import fs, types

from karvan.argument_checks import listed
from karvan.data.columns.arrow_to_torch import whole_numbers
from karvan.data.columns.kinds import common_type, kind_of
from karvan.data.errors import DataError, located
from karvan.data.formats.paths import Files
from karvan.data.identity import fingerprint_files
from karvan.data.retry import FileOutages
from karvan.data.source import Part, Split, require_inside
from karvan.threads import map_on_threads

# How much a group of a file may become in memory, for formats whose groups are decoded by Arrow.
#
# A few bytes can stand for thousands of times as many. So what a group (a row group, record batch or stripe)
# declares is read before it is decoded. A group may become `MOST` bytes, or `TIMES` its stored size if that
# is more: real groups rarely exceed that, since all of their columns count.


MOST, TIMES = 256 << 20, 64


def most_decoded(stored: int) -> int:
    """How many bytes a group may have once it is decoded."""
    return max(MOST, TIMES * stored)


def check_decoded(size: int, stored: int) -> None:
    """Raise a DataError if a group of so many stored bytes declares that it becomes too large."""
    if size > most_decoded(stored):
        raise DataError(too_large(stored, f"declares {size:,} bytes"))


def too_large(stored: int, what: str) -> str:
    """The message for a group that would become too large."""
    return (
        f"Expected at most {most_decoded(stored):,} bytes once decoded, since {stored:,} are stored, but it "
        f"{what}. Write the file with fewer records in each row group, record batch or stripe."
    )


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number with 7 bits in each byte, and where it ends; an IndexError if the bytes end before.

    An OverflowError for more than 10 bytes.
    """
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise OverflowError


def write_at(file: FileIO, data: bytes, at: int) -> None:
    """Write all of these bytes at a place of a file, which may take several calls."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file.fileno(), view, at)
        view, at = view[written:], at + written


_log = logging.getLogger("karvan.data")

_STORED_READERS = 4  # each may hold a decoded stripe


@dataclass(frozen=True)
class Layout:
    """A file's columns and where its groups start: `starts` has one entry more than there are groups.

    `nulls` are columns that are known to lack values; only those of the first file are asked for.
    """

    schema: pa.Schema
    starts: NDArray[np.int64]
    detail: Any = None
    nulls: frozenset[str] = frozenset()

    @property
    def records(self) -> int:
        """How many records the file has."""
        return int(self.starts[-1])


class FileSource(ABC):
    """Files of one format, with the columns of the first of them.

    Every file must have these columns, with types that one type can hold (see
    `karvan/data/columns/kinds.py`); `columns` selects some of them, so that others are not read. All
    files are inspected when the schema is first requested.
    """

    group_name: ClassVar[str]
    quick_inspection: ClassVar[bool] = False
    """Whether a local file is inspected in less time than another thread needs to start."""

    def __init__(self, files: Files, columns: Sequence[str] | None = None) -> None:
        self._files = files
        self.outages = FileOutages(files)
        self._columns = None if columns is None else list(columns)
        self._layouts: dict[str, Layout] = {}
        self._schema: pa.Schema | None = None
        self._declared: dict[str, pa.DataType] = {}
        self._declared_lists: set[str] = set()
        self._readers: dict[tuple[str, int], _Reader] = {}
        self._lock = Lock()
        self._inspecting = Lock()

    @property
    def schema(self) -> pa.Schema:
        """The columns that are read, with types that hold the values of all files."""
        with self._inspecting:
            if self._schema is None:
                self._schema = self._find_schema()
            return self._schema

    def _find_schema(self) -> pa.Schema:
        names = self.names
        self._inspect_all()
        unread: dict[str, str] = {}
        different: dict[str, pa.Schema] = {}  # mostly all files have the schema of the first
        for path in self._files.paths:
            schema = self._layouts[path].schema
            if any(schema.equals(other) for other in different.values()):
                continue
            different[path] = schema
            for name in names:
                _require_column(schema, name, path)
            if self._columns is None:
                unread.update((name, path) for name in schema.names if name not in names)
        for name, path in unread.items():
            _log.warning(
                "Column '%s' of %s is not read, because %s does not have it.",
                name,
                path,
                self._files.paths[0],
            )
        return pa.schema([(name, self._type(name, different)) for name in names])

    def _inspect_all(self) -> None:
        unknown = [path for path in self._files.paths if path not in self._layouts]

        def inspect(path: str) -> None:  # layouts found so far remain, even if another file cannot be reached
            self._layouts[path] = self._inspect_file(path)

        if self.quick_inspection and isinstance(self._files.filesystem, fs.LocalFileSystem):
            for path in unknown:
                inspect(path)
        else:
            map_on_threads(inspect, unknown, 8)

    def columns_with_nulls(self) -> frozenset[str]:
        """The columns that are known to lack values in the first file."""
        assert self.schema is not None  # all files are inspected
        return self._layouts[self._files.paths[0]].nulls

    def first_of_kind(self, name: str) -> str | None:
        """The first file whose column has the kind that it has in the schema."""
        kind = kind_of(self.schema.field(name).type)
        for path in self._files.paths:
            index = self._layouts[path].schema.get_field_index(name)
            if index >= 0 and kind_of(self._layouts[path].schema.field(index).type) == kind:
                return path
        return None

    def _type(self, name: str, schemas: Mapping[str, pa.Schema]) -> pa.DataType:
        """The type of a column over files of these schemas."""
        types = ((path, schema.field(name).type) for path, schema in schemas.items())
        return common_type(name, types, self._declared.get(name))

    def declare_numbers(self, name: str, floating: bool) -> None:
        """Declare the type of a column of which some files have integers and others floats."""
        self._declared[name] = pa.float64() if floating else pa.int64()

    def declare_list(self, name: str) -> None:
        """Declare that a column has lists, for formats whose files do not store this."""
        self._declared_lists.add(name)

    @property
    def names(self) -> list[str]:
        """The columns that are read; those of the first file unless they were named."""
        if self._columns is not None:
            return list(self._columns)
        first = self._files.paths[0]
        if first not in self._layouts:
            self._layouts[first] = self._inspect_file(first)
        with located(first):
            return list(self._layouts[first].schema.names)

    def parts(self) -> list[Part]:
        """All files, with their counts of records."""
        return [Part(path, self._layout(path).records) for path in self._files.paths]

    @property
    def group_records(self) -> int | None:
        """How many records a group typically has: splits of about that size decode nothing twice."""
        sizes = np.concatenate([np.diff(self._layout(part.path).starts) for part in self.parts()])
        return int(np.median(sizes)) if len(sizes) and np.median(sizes) >= 1 else None

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The records of a split in order."""
        if split.path not in self._files.paths:
            raise DataError("The split names a file that this source does not have.", path=split.path)
        layout = self._layout(split.path)
        require_inside(split, layout.records)
        first, end = split.first, split.first + split.count
        if first == end:
            return
        group = int(np.searchsorted(layout.starts, first, side="right")) - 1
        group_start = int(layout.starts[group])
        with self._lock:  # a reader that stopped here, or before in the same group, which it has decoded
            stops = [at for path, at in self._readers if path == split.path and group_start <= at <= first]
            reader = self._readers.pop((split.path, max(stops))) if stops else None
        if reader is None:
            reader = _Reader(self._batches(split.path, layout, group), group_start)
        yield from reader.take(first, end)
        if end < layout.records:
            with self._lock:
                self._readers[(split.path, end)] = reader
                while len(self._readers) > _STORED_READERS:
                    del self._readers[next(iter(self._readers))]

    def fingerprint(self) -> str:
        """A hash of the bytes; see `karvan/data/identity.py`."""
        return fingerprint_files(self._files.filesystem, self._files.paths)

    @abstractmethod
    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        """Read the columns and the groups of a file."""

    @abstractmethod
    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The pieces of all groups from `group` to the end of the file, each with its group's number."""

    def _open(self, path: str) -> pa.NativeFile:
        return self._files.filesystem.open_input_file(path)

    def _layout(self, path: str) -> Layout:
        assert self.schema is not None  # finding it inspects all files
        return self._layouts[path]

    def _inspect_file(self, path: str) -> Layout:
        with located(path):
            info = self._files.filesystem.get_file_info(path)
            if info.type != fs.FileType.File:
                raise DataError("There is no such file.", path=path)
            if info.size == 0:
                raise DataError("The file is empty: it has not a single byte.", path=path)
            with self._open(path) as file:
                return self._inspect(path, file)

    def _batches(self, path: str, layout: Layout, group: int) -> Iterator[pa.RecordBatch]:
        """The pieces of a file from a group on, each group checked against its count."""
        schema = self.schema
        pieces = self._groups(path, layout, group, schema.names)
        starts = layout.starts
        at = int(starts[group])
        while True:
            while group < len(starts) - 1 and at == starts[group + 1]:
                group += 1
            try:
                with located(path, self._place(layout, group)):
                    index, batch = next(pieces, (-1, None))
                    if batch is not None:
                        # The same schema object for all, without the metadata of the program that wrote the
                        # file.
                        batch = pa.RecordBatch.from_arrays(
                            [_widened(batch.column(field.name), field, at) for field in schema],
                            schema=schema,
                        )
            except DataError as error:
                cause = error.__cause__  # a DataError would say the same with less
                raise self._blamed(error, path, layout, group) from (
                    None if isinstance(cause, DataError) else cause
                )
            if group == len(starts) - 1 and batch is None:
                return
            if batch is None or index != group or at + batch.num_rows > starts[group + 1]:
                expected = int(starts[group + 1] - starts[group]) if group < len(starts) - 1 else 0
                raise DataError(
                    f"Expected {expected} records, but there are {'fewer' if index != group else 'more'}.",
                    path=path,
                    place=self._place(layout, group),
                )
            at += batch.num_rows
            yield batch

    def _blamed(self, error: DataError, path: str, layout: Layout, group: int) -> DataError:
        """The same error with the name of the column that fails if it is read alone."""
        if error.column is not None or error.__cause__ is None or error.temporary:
            return error
        errors: list[DataError] = []
        for name in self.schema.names:
            try:
                with located(path, self._place(layout, group), name):
                    next(self._groups(path, layout, group, [name]), None)
            except DataError as narrower:
                errors.append(narrower)
        # If none, or every one, fails alone, the error is not specific to a column.
        return errors[0] if 0 < len(errors) < len(self.schema) else error

    def _place(self, layout: Layout, group: int) -> str:
        return f"{self.group_name} {group}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._files.paths)} files, columns {self.schema.names})"


class _Reader:
    """The reading position in a file: the pieces that follow, and the rest of the current one."""

    def __init__(self, batches: Iterator[pa.RecordBatch], at: int) -> None:
        self._batches = batches
        self._at = at
        self._rest: pa.RecordBatch | None = None

    def take(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        while self._at < end:
            batch = self._rest
            if batch is None:
                batch = next(self._batches)
            skipped = max(first - self._at, 0)
            stop = min(end - self._at, batch.num_rows)
            self._rest = batch.slice(stop) if stop < batch.num_rows else None
            self._at += stop
            if skipped < stop:
                yield batch.slice(skipped, stop - skipped)


def _widened(column: pa.Array, field: pa.Field, first_record: int) -> pa.Array:
    type_ = field.type
    # Only to types that hold all values; safe=False is needed for the bits of unsigned ids and for binary
    # text.
    if types.is_floating(column.type) and types.is_integer(type_):
        with located(column=field.name):
            return whole_numbers(column, first_record)
    return column if column.type == type_ else column.cast(type_, safe=False)


def _require_column(schema: pa.Schema, name: str, path: str) -> None:
    """Raise a DataError unless a file has a column once."""
    indices = schema.get_all_field_indices(name)
    if len(indices) != 1:
        what = "missing" if not indices else f"present {len(indices)} times"
        raise DataError(
            f"The column is {what}. The file's columns are: {listed(name, schema.names)}",
            path=path,
            column=name,
        )
