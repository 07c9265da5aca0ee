"""`RecordSource`: what TFRecord and RecordIO share, files of byte records.

Groups are runs of records of about 2 MB, which are found once, from the records' frames, when a file is
inspected. A file that was compressed as a whole (gzip, zlib) has no positions to start at, so it is one
group, read through once to count, and always from its beginning.

`content` says what a record holds:

- "example": a tf.Example (see `tf_example.py`). The columns are the features of the first records of all
  files, with their types, unless `schema` declares them.
- "bytes": anything. It is the only column, `record`, unless `decode` turns a list of records into the same
  number of rows.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import pyarrow as pa
from pyarrow import fs, types

from karvan.data.columns.kinds import common_type, type_of
from karvan.data.errors import DataError
from karvan.data.formats import tf_example as examples
from karvan.data.formats.base import FileSource, Layout
from karvan.data.formats.paths import Files, PathLike, resolve
from karvan.data.formats.tf_example import Bytes, Payloads, Places
from karvan.data.in_memory import BYTES_SCHEMA, DecodeBytes, bytes_rows

# Files compressed as a whole with gzip or zlib, read from their beginning.
#
# A few bytes may stand for a thousand times as many. So nobody asks for as many as a record claims to have
# without `check_record`.


MOST_RECORD = 64 << 20  # bytes of a record, or of a chunk, of a file that is compressed as a whole
_BLOCK = 1 << 20
_GZIP_OR_ZLIB = 47  # of zlib: the largest window, and the header says which of the two it is


def check_record(size: int, place: str | None = None) -> None:
    """Raise a DataError if a record, or a chunk, of a file that is compressed as a whole is too large."""
    if size > MOST_RECORD:
        raise DataError(
            f"A file that is compressed as a whole expects records, or chunks of records, of at most "
            f"{MOST_RECORD >> 20} MiB, got one of {size:,} bytes.",
            place=place,
        )


class ByteStream(Protocol):
    """Bytes that can be read in order."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end."""


def is_compressed(start: bytes) -> bool:
    """Whether a file starts with a header of gzip (`1f 8b 08`) or zlib (divisible by 31)."""
    if start[:3] == b"\x1f\x8b\x08":
        return True
    return (
        len(start) >= 2
        and start[0] & 15 == 8
        and start[0] >> 4 <= 7
        and start[0] * 256 % 31 == -start[1] % 31
    )


class InflatedFile:
    """The uncompressed bytes of a compressed file. A file that is cut off or damaged is an error."""

    def __init__(self, file: ByteStream) -> None:
        self._file = file
        self._member = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._input = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end."""
        pieces: list[bytes] = []
        remaining = size
        while remaining:
            piece = self._next(remaining)
            if not piece:
                break
            pieces.append(piece)
            remaining -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _next(self, most: int) -> bytes:
        while True:
            if not self._input:
                self._input = self._file.read(_BLOCK)
            if self._member.eof:
                if not self._input:
                    return b""
                self._member = zlib.decompressobj(_GZIP_OR_ZLIB)  # gzip files may be joined
            at_end = not self._input
            try:
                piece = self._member.decompress(self._input, most)
            except zlib.error as error:
                raise ValueError(f"The compressed data is damaged ({error}).") from error
            self._input = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if piece:
                return piece
            if at_end and not self._member.eof:
                raise ValueError("The compressed data is cut off: its end is missing.")


RUN = 2 << 20
_MOST_RECORDS = 1 << 16  # in a batch: short records need many times their bytes as objects of Python
_SAMPLE = 1000  # records from which the features are inferred
_OTHERS = {
    b"PAR1": "Parquet",
    b"ORC": "ORC",
    b"ARROW1": "Arrow IPC",
    b"\x04\x03\x02\x01": "RecordIO",
    b"\x28\xb5\x2f\xfd": "zstd, which is not supported here: compress with gzip",
    b"\xce\xd7\x23\x0a": "MXNet's RecordIO, which is not supported",
}


@dataclass(frozen=True)
class Index:
    """Where runs begin: their first bytes and their first records, with the end added to both.

    `bounds` is None for a file that is compressed as a whole.
    """

    bounds: Places | None
    starts: Places


class RecordSource(FileSource):
    """Files of byte records."""

    group_name = "run"
    format_name: ClassVar[str]

    def __init__(
        self,
        files: Files,
        columns: Sequence[str] | None = None,
        *,
        content: str | None = None,
        schema: pa.Schema | Mapping[str, pa.DataType | str] | None = None,
        decode: DecodeBytes | None = None,
    ) -> None:
        super().__init__(files, columns)
        if content is None:
            content = "example" if decode is None else "bytes"
        if content not in ("example", "bytes"):
            raise ValueError(f"content must be 'example' or 'bytes', but is {content!r}.")
        if content == "bytes" and schema is not None:
            raise ValueError("schema is for tf.Example records; for bytes, decode= decides the columns.")
        if content == "example" and decode is not None:
            raise ValueError("decode is for content='bytes'; tf.Example records are decoded automatically.")
        if isinstance(schema, pa.Schema):
            schema = {field.name: field.type for field in schema}
        self._declared_types = {name: type_of(type_, name) for name, type_ in (schema or {}).items()}
        for name, type_ in self._declared_types.items():
            examples.check_type(name, type_)
        self._is_example = content == "example"
        self._decode = decode

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        if self._columns is None and self._is_example:
            return list(self.schema.names)
        return super().names

    def _find_schema(self) -> pa.Schema:
        if not self._is_example:
            return super()._find_schema()
        self._inspect_all()
        types_by_name: dict[str, dict[str, pa.DataType]] = {}
        for path in self._files.paths:
            for field in self._layouts[path].schema:
                types_by_name.setdefault(field.name, {})[path] = field.type
        names = [
            *self._declared_types,
            *sorted(name for name in types_by_name if name not in self._declared_types),
        ]
        fields = []
        for name in names if self._columns is None else self._columns:
            if name not in names:
                raise DataError(
                    "The column is missing. The first records have: "
                    f"{', '.join(names) or 'none'}. Declare features of later records with schema=.",
                    path=self._files.paths[0],
                    column=name,
                )
            type_ = self._declared_types.get(name)
            fields.append((name, type_ or self._feature_type(name, types_by_name[name])))
        return pa.schema(fields)

    def _feature_type(self, name: str, of_files: Mapping[str, pa.DataType]) -> pa.DataType:
        """One type of a feature: lists in all files, if they are in one, or if this was declared."""
        if name in self._declared_lists or any(map(types.is_list, of_files.values())):
            of_files = {
                path: type_ if types.is_list(type_) or types.is_null(type_) else pa.list_(type_)
                for path, type_ in of_files.items()
            }
        return common_type(name, of_files.items())

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        start = file.read(12)
        if self._is_plain(start):
            index = self._find_runs(file)
        elif is_compressed(start):
            file.seek(0)
            total = sum(len(records) for records in self._scan(InflatedFile(file)))
            index = Index(None, np.array([0, total] if total else [0], np.int64))
        else:
            raise DataError(self._wrong(start), path=path)
        layout = Layout(BYTES_SCHEMA, index.starts, index)
        schema = self._content_schema(file, layout)
        return Layout(schema, index.starts, index)

    def _content_schema(self, file: pa.NativeFile, layout: Layout) -> pa.Schema:
        if not self._is_example and self._decode is None:
            return BYTES_SCHEMA
        _, first = next(self._payloads(file, layout, 0), (0, None))
        if self._is_example:
            summaries = {} if first is None else examples.summarise(first.head(_SAMPLE))
            return pa.schema(list(summaries.items()))
        if first is None:
            raise DataError("The file is empty, so decode= cannot show which columns its records have.")
        assert self._decode is not None
        return self._decode(first.head(1).to_list()).schema

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        chosen = {name: self.schema.field(name).type for name in columns}
        all_named = self._columns is None and len(chosen) == len(self.schema)
        with self._open(path) as file:
            for number, records in self._payloads(file, layout, group):
                if self._is_example:
                    yield number, examples.decode(records, chosen, all_named)
                    continue
                payloads = records.to_list()
                batch = bytes_rows(payloads) if self._decode is None else self._decode(payloads)
                if batch.num_rows != len(payloads):
                    raise ValueError(f"decode returned {batch.num_rows} rows for {len(payloads)} records.")
                yield number, batch.select(list(columns))

    def _payloads(self, file: pa.NativeFile, layout: Layout, group: int) -> Iterator[tuple[int, Payloads]]:
        """The records from a group on, some at a time, and the number of their group."""
        index: Index = layout.detail
        if index.bounds is None:
            file.seek(0)
            for records in self._scan(InflatedFile(file)):
                yield from ((0, some) for some in records.pieces(_MOST_RECORDS))
            return
        for number, (begin, end) in enumerate(pairwise(index.bounds.tolist()[group:]), group):
            file.seek(begin)
            data = file.read(end - begin)
            if len(data) != end - begin:
                raise EOFError(
                    f"Expected {end - begin} bytes at byte {begin}, but the file ends after {len(data)}."
                )
            for records in self._read_run(data, begin, int(index.starts[number])):
                yield from ((number, some) for some in records.pieces(_MOST_RECORDS))

    def _wrong(self, start: bytes) -> str:
        """The message for a file that begins differently."""
        for magic, name in _OTHERS.items():
            if start.startswith(magic) and name != self.format_name:
                return f"The file is not {self.format_name}. By its first bytes it is {name}."
        return f"The file does not begin like {self.format_name}: it is damaged, or of another format."

    @abstractmethod
    def _is_plain(self, start: bytes) -> bool:
        """Whether these are the first bytes of a file of this format that is not compressed as a whole."""

    @abstractmethod
    def _find_runs(self, file: pa.NativeFile) -> Index:
        """The runs of a file that is not compressed as a whole."""

    @abstractmethod
    def _read_run(self, data: bytes, at: int, first: int) -> Iterator[Payloads]:
        """The records of a run that begins at byte `at` of the file, some at a time, as far as what is
        compressed needs it; all checksums are verified.
        """

    @abstractmethod
    def _scan(self, stream: ByteStream) -> Iterator[Payloads]:
        """The records of a stream, some at a time; all checksums are verified."""


# `RecordFileWriter`: what the writers of TFRecord and RecordIO share.
#
# A file of these formats that ends after any record, or chunk, looks complete. So that a failed writer does
# not leave a shorter file, it writes to a hidden file next to it, which is renamed at the end; object stores
# show a file only when it is closed anyway.


_OBJECT_STORES = ("s3", "gcs", "abfs")
_WINDOW_BITS = {"gzip": 31, "zlib": 15}
_ROWS = 4096
_LARGEST = 1 << 31  # more than Arrow's bytes can hold


class RecordFileWriter(ABC):
    """Writes records in order. Use it in a `with` block: the file appears when it ends without an error."""

    def __init__(
        self, path: PathLike, filesystem: fs.FileSystem | None, compression: str | None, flush_bytes: int
    ) -> None:
        self._system, self._path = resolve(path, filesystem)
        folder, slash, name = self._path.rpartition("/")
        in_place = self._system.type_name in _OBJECT_STORES
        self._temporary_path = self._path if in_place else f"{folder}{slash}.{name}.unfinished"
        self._file = self._system.open_output_stream(self._temporary_path, compression=None)
        self._deflate: Any = None
        if compression is not None:
            self._deflate = zlib.compressobj(wbits=_WINDOW_BITS[compression])
        self._flush_bytes = flush_bytes
        self._buffered: list[bytes] = []
        self._buffered_bytes = 0

    def write(self, record: bytes) -> None:
        """Append one record."""
        self._check(len(record))
        if self._buffered and self._buffered_bytes + len(record) > self._flush_bytes:
            self._flush()
        self._buffered.append(bytes(record))
        self._buffered_bytes += len(record)

    def write_rows(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Append rows as tf.Example records, one for each. Nulls are omitted; see `tf_example.py`."""
        self._flush()
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        for batch in table.to_batches(max_chunksize=_ROWS):
            data, bounds = examples.encode(batch)
            first = 0
            while first < batch.num_rows:
                end = int(np.searchsorted(bounds, bounds[first] + self._flush_bytes, side="right")) - 1
                end = min(max(end, first + 1), batch.num_rows)
                self._check(int(np.diff(bounds[first : end + 1]).max()))
                self._put(self._frame(data, bounds[first : end + 1]))
                first = end

    def close(self) -> None:
        """Write buffered records, and give the file its name."""
        if self._file.closed:
            return
        self._flush()
        if self._deflate is not None:
            self._file.write(self._deflate.flush())
        self._file.close()
        if self._temporary_path != self._path:
            self._system.move(self._temporary_path, self._path)

    def discard(self) -> None:
        """Stop writing, and remove the unfinished file."""
        if not self._file.closed:
            self._file.close()
            self._system.delete_file(self._temporary_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    @property
    def _is_deflated(self) -> bool:
        """Whether the file is compressed as a whole."""
        return self._deflate is not None

    @abstractmethod
    def _frame(self, data: Bytes, bounds: Places) -> bytes:
        """The bytes to write for records data[bounds[i]:bounds[i + 1]]."""

    def _check(self, size: int) -> None:
        """Raise if a record is too large."""
        if size >= _LARGEST:
            raise ValueError(f"A record must be smaller than 2 GiB, but has {size} bytes.")

    def _flush(self) -> None:
        if not self._buffered:
            return
        bounds = np.cumsum([0, *map(len, self._buffered)], dtype=np.int64)
        data = np.frombuffer(b"".join(self._buffered), np.uint8)
        self._buffered, self._buffered_bytes = [], 0
        self._put(self._frame(data, bounds))

    def _put(self, data: bytes) -> None:
        self._file.write(data if self._deflate is None else self._deflate.compress(data))
