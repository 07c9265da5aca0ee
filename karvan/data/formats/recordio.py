"""RecordIO: files of byte records with checksums and an index.

All numbers are little-endian.

    file    = head, records, index, foot
    head    = "KVRECORD", u16 version (1), u16 content (0: bytes, 1: rows), u32 size of schema, schema,
              u32 crc32 of all this
    record  = u32 size, u32 crc32 of the payload, payload
    index   = for each run of records: u64 byte at which it begins, u64 rows before it
    foot    = u64 byte at which the index begins, u64 rows, u32 crc32 of index and these two, "KVRECEND"

In a file of bytes, every record is one row: whatever the writer was given. Read as a source it is the one
column `record`, unless `decode` makes columns of it. In a file of rows, the schema is an Arrow IPC schema
message, and a record is the IPC message of a record batch of some thousand rows: all types of Arrow, at
Arrow's speed. A run is what the index can point to: about 256 kB of byte records, or one record of rows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import fs, ipc

from karvan.data.errors import DataError, located
from karvan.data.formats.base import FileSource, Layout
from karvan.data.formats.paths import Files, PathLike, resolve
from karvan.data.streaming.record_batches import BYTES_SCHEMA, DecodeBytes, bytes_rows

_MAGIC, _END = b"KVRECORD", b"KVRECEND"
_HEAD = struct.Struct("<8sHHI")
_RECORD = struct.Struct("<II")
_FOOT = struct.Struct("<QQI8s")
_BYTES, _ROWS = 0, 1
_RUN = 256 << 10
_ROWS_PER_RECORD = 8192


class RecordWriter:
    """Writes a file of byte records, or of rows if there is a schema. Use it in a `with` block.

    The file is complete when the block ends without an error; before, and after an error, readers refuse it.
    """

    def __init__(
        self, path: PathLike, schema: pa.Schema | None = None, filesystem: fs.FileSystem | None = None
    ) -> None:
        system, inside = resolve(path, filesystem)
        self._schema = schema
        self._file = system.open_output_stream(inside)
        self._index: list[tuple[int, int]] = []
        self._at = 0
        self._rows = 0
        message = b"" if schema is None else schema.serialize().to_pybytes()
        head = _HEAD.pack(_MAGIC, 1, _BYTES if schema is None else _ROWS, len(message)) + message
        self._put(head + struct.pack("<I", zlib.crc32(head)))

    def write(self, record: bytes) -> None:
        """Append one byte record."""
        if self._schema is not None:
            raise ValueError("This file has a schema and takes rows: call write_rows.")
        if not self._index or self._at - self._index[-1][0] >= _RUN:
            self._index.append((self._at, self._rows))
        self._record(record, 1)

    def write_rows(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Append rows, which must have the file's schema."""
        if self._schema is None:
            raise ValueError("This file takes bytes: call write, or give the writer a schema.")
        if not rows.schema.equals(self._schema):
            raise ValueError(f"Expected rows with the schema\n{self._schema}\nbut theirs is\n{rows.schema}")
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        for batch in table.to_batches(max_chunksize=_ROWS_PER_RECORD):
            self._index.append((self._at, self._rows))
            self._record(batch.serialize().to_pybytes(), batch.num_rows)

    def close(self) -> None:
        """Write index and foot."""
        if self._file.closed:
            return
        begin = self._at
        index = np.array(self._index, np.dtype("<u8")).tobytes()
        places = struct.pack("<QQ", begin, self._rows)
        self._put(index + _FOOT.pack(begin, self._rows, zlib.crc32(index + places), _END))
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    def _record(self, payload: bytes, rows: int) -> None:
        if len(payload) >= 1 << 32:
            raise ValueError(f"A record must be smaller than 4 GiB, but has {len(payload)} bytes.")
        self._put(_RECORD.pack(len(payload), zlib.crc32(payload)) + payload)
        self._rows += rows

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._at += len(data)


class RecordIOSource(FileSource):
    """RecordIO files. `decode` turns byte records into rows, as many as there are records."""

    group_name = "run"

    def __init__(
        self, files: Files, columns: Sequence[str] | None = None, *, decode: DecodeBytes | None = None
    ) -> None:
        super().__init__(files, columns)
        self._decode = decode

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        schema, bounds, starts = read_index(file)
        if self._decode is not None:
            if schema is not None:
                raise DataError("The file has rows with a schema; there is nothing to decode.", path=path)
            first = next(_payloads(file, int(bounds[0]), int(bounds[1]))) if len(bounds) > 1 else None
            if first is None:
                raise DataError(
                    "The file has no record from which decode= could tell the columns.", path=path
                )
            schema = self._decode([first]).schema
        return Layout(BYTES_SCHEMA if schema is None else schema, starts, (schema, bounds))

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        schema, bounds = layout.detail
        with self._open(path) as file:
            for number, (begin, end) in enumerate(pairwise(bounds.tolist()[group:]), group):
                payloads = list(_payloads(file, begin, end))
                if self._decode is not None:
                    batch = self._decode(payloads)
                    if batch.num_rows != len(payloads):
                        raise ValueError(f"decode made {batch.num_rows} rows of {len(payloads)} records.")
                elif schema is None:
                    batch = bytes_rows(payloads)
                else:
                    (message,) = payloads
                    batch = ipc.read_record_batch(pa.py_buffer(message), schema)
                    batch.validate(full=True)
                yield number, batch.select(list(columns))


def read_records(path: PathLike, filesystem: fs.FileSystem | None = None) -> Iterator[bytes]:
    """All records of a file as they were written, without a source around them."""
    system, inside = resolve(path, filesystem)
    with located(inside), system.open_input_file(inside) as file:
        _, bounds, _ = read_index(file)
        for begin, end in pairwise(bounds.tolist()):
            yield from _payloads(file, begin, end)


def read_index(file: pa.NativeFile) -> tuple[pa.Schema | None, NDArray[np.int64], NDArray[np.int64]]:
    """The schema of a file of rows, the bytes and the rows at which runs begin, both with the end added."""
    size = file.size()
    if size < _HEAD.size + 4 + _FOOT.size:
        raise ValueError("The file is too short for a RecordIO file.")
    head = _exactly(file, 0, _HEAD.size)
    magic, version, content, schema_size = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise ValueError("The file does not begin as a RecordIO file does.")
    if version != 1 or content not in (_BYTES, _ROWS):
        raise ValueError(f"Expected RecordIO version 1, content 0 or 1, but have {version} and {content}.")
    records_begin = _HEAD.size + schema_size + 4
    if records_begin + _FOOT.size > size:
        raise ValueError("The head is longer than the file.")
    message = _exactly(file, _HEAD.size, schema_size)
    (crc,) = struct.unpack("<I", _exactly(file, _HEAD.size + schema_size, 4))
    if crc != zlib.crc32(head + message):
        raise ValueError("The head does not fit its checksum.")
    index_begin, rows, crc, end = _FOOT.unpack(_exactly(file, size - _FOOT.size, _FOOT.size))
    if end != _END:
        raise ValueError("The end is missing: the file is truncated, or its writer did not finish.")
    index_size = size - _FOOT.size - index_begin
    if index_begin < records_begin or index_size < 0 or index_size % 16:
        raise ValueError("The index does not lie where the foot says.")
    index = _exactly(file, index_begin, index_size)
    if crc != zlib.crc32(index + struct.pack("<QQ", index_begin, rows)):
        raise ValueError("The index does not fit its checksum.")
    places = np.frombuffer(index, np.dtype("<u8")).reshape(-1, 2).astype(np.int64)
    bounds = np.append(places[:, 0], index_begin)
    starts = np.append(places[:, 1], rows)
    schema = ipc.read_schema(pa.py_buffer(message)) if content == _ROWS else None
    return schema, bounds, starts


def _payloads(file: pa.NativeFile, begin: int, end: int) -> Iterator[bytes]:
    run = _exactly(file, begin, end - begin)
    at = 0
    while at < len(run):
        if at + _RECORD.size > len(run):
            raise ValueError(f"The record at byte {begin + at} goes on beyond its run.")
        size, crc = _RECORD.unpack_from(run, at)
        at += _RECORD.size
        payload = run[at : at + size]
        if len(payload) != size or zlib.crc32(payload) != crc:
            raise ValueError(f"The record at byte {begin + at - _RECORD.size} does not fit its checksum.")
        yield payload
        at += size


def _exactly(file: pa.NativeFile, at: int, size: int) -> bytes:
    file.seek(at)
    data: bytes = file.read(size)
    if len(data) != size:
        raise EOFError(f"Expected {size} bytes at byte {at}, but the file ends after {len(data)}.")
    return data
