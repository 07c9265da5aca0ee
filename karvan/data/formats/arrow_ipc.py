"""Arrow IPC: files (also called Feather, version 2) and streams. Groups are record batches.

A stream has no index: its messages are walked to count, and it is always read from its beginning, so small
splits of it are best read in order. It must end with its end mark, since without it a truncated stream would
look complete. What compressed buffers declare is checked before Arrow decompresses them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
from pyarrow import fs, ipc

from karvan.data.formats.base import FileSource, Layout, check_decoded

_FILE = b"ARROW1"
_MARK = 0xFFFFFFFF
_DICTIONARY, _RECORDS = 2, 3  # kinds of messages


@dataclass(frozen=True, slots=True)
class _Index:
    """Where the messages of dictionaries and record batches begin."""

    is_file: bool
    dictionaries: list[int]
    batches: list[int]


class IpcSource(FileSource):
    """Arrow IPC files; counts come from the head of each record batch, whose columns are not read."""

    group_name = "record batch"

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        is_file = file.read(len(_FILE)) == _FILE
        file.seek(0)
        schema = (ipc.open_file(file) if is_file else ipc.open_stream(file)).schema
        try:
            index = _Index(True, *_blocks(file)) if is_file else _Index(False, *_walk(file))
            counts = [_Message(file, at).records for at in index.batches]
        except struct.error as error:
            raise ValueError("The heads of its messages cannot be read: it is cut off or damaged.") from error
        return Layout(schema, np.cumsum([0, *counts], dtype=np.int64), index)

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        options = ipc.IpcReadOptions(
            included_fields=[layout.schema.get_field_index(name) for name in columns]
        )
        index: _Index = layout.detail
        with self._open(path) as file, self._open(path) as heads:
            is_local = isinstance(self._files.filesystem, fs.LocalFileSystem)
            for at in index.dictionaries + ([] if index.is_file else index.batches[:group]):
                _check(heads, at, is_local)
            batches: Iterator[pa.RecordBatch]
            if index.is_file:
                opened = ipc.open_file(file, options=options)
                batches = map(opened.get_batch, range(group, len(index.batches)))
            else:
                batches = islice(ipc.open_stream(file, options=options), group, None)
            for number in range(group, len(index.batches)):
                _check(heads, index.batches[number], is_local)
                batch = next(batches)
                # Arrow trusts the offsets in a file; damaged ones would point outside of the buffers.
                batch.validate(full=True)
                yield number, batch


class _Message:
    """The head of a message: a Flatbuffer, of which https://arrow.apache.org/docs/format has the fields."""

    def __init__(self, file: pa.NativeFile, at: int) -> None:
        mark, size = struct.unpack("<II", file.read_at(8, at))
        begin = at + (8 if mark == _MARK else 4)  # early versions had no mark
        self._file = file
        self._head = _Flatbuffer(bytes(file.read_at(size if mark == _MARK else mark, begin)))
        self.body = begin + len(self._head.data)
        message = self._head.root()
        self.kind = self._head.number("<B", message, 1)
        self.body_size = self._head.number("<q", message, 3)
        content = self._head.table(message, 2)
        if self.kind == _DICTIONARY:
            content = self._head.table(content, 1)
        self._content = content

    @property
    def records(self) -> int:
        """How many records it has."""
        return self._head.number("<q", self._content, 0)

    def check(self, is_local: bool) -> None:
        """Raise a DataError if its buffers declare that they become too large."""
        if not self._head.field(self._content, 3):
            return  # it is not compressed
        stored = min(self.body_size, self._file.size())
        # A read of another file system takes long, so that there is one.
        body = None if is_local else bytes(self._file.read_at(stored, self.body))
        total = 0
        for at, size in self._head.structs("<qq", self._content, 2):
            if size >= 8:
                head = self._file.read_at(8, self.body + at) if body is None else body[at : at + 8]
                (declared,) = struct.unpack("<q", head)
                total += size if declared == -1 else declared
        check_decoded(total, stored)


class _Flatbuffer:
    """The fields of tables in bytes; Arrow has verified them, or will."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def root(self) -> int:
        """The position of the first table."""
        return self._read("<I", 0)

    def field(self, table: int, number: int) -> int:
        """The position of a field of a table; 0 where it is missing."""
        fields = table - self._read("<i", table)
        at = 4 + 2 * number
        offset = self._read("<H", fields + at) if at < self._read("<H", fields) else 0
        return table + offset if offset else 0

    def number(self, layout: str, table: int, number: int) -> int:
        """The value of a field that is a number."""
        at = self.field(table, number)
        return self._read(layout, at) if at else 0

    def table(self, table: int, number: int) -> int:
        """The position of a table, or vector, that is a field of another."""
        at = self.field(table, number)
        return at + self._read("<I", at)

    def structs(self, layout: str, table: int, number: int) -> list[tuple[int, ...]]:
        """The values of a vector of structs."""
        if not self.field(table, number):
            return []
        at = self.table(table, number)
        size = struct.calcsize(layout)
        return [
            struct.unpack_from(layout, self.data, at + 4 + size * index)
            for index in range(self._read("<I", at))
        ]

    def _read(self, layout: str, at: int) -> int:
        value: int = struct.unpack_from(layout, self.data, at)[0]
        return value


def _check(file: pa.NativeFile, at: int, is_local: bool) -> None:
    """Raise an error if a message declares too much, or what lies outside of the file."""
    try:
        _Message(file, at).check(is_local)
    except struct.error as error:
        raise ValueError("The head of its message cannot be read: it is cut off or damaged.") from error


def _blocks(file: pa.NativeFile) -> tuple[list[int], list[int]]:
    """Where the dictionaries and record batches of a file begin, as its footer says."""
    tail = file.size() - len(_FILE) - 4
    (size,) = struct.unpack("<i", file.read_at(4, tail))
    footer = _Flatbuffer(bytes(file.read_at(size, tail - size)))
    dictionaries, batches = (
        [block[0] for block in footer.structs("<qiiq", footer.root(), field)] for field in (2, 3)
    )
    return dictionaries, batches


def _walk(file: pa.NativeFile) -> tuple[list[int], list[int]]:
    """Where the dictionaries and record batches of a stream begin."""
    blocks: dict[int, list[int]] = {_DICTIONARY: [], _RECORDS: []}
    at, size = 0, file.size()
    while file.read_at(8, at) != struct.pack("<II", _MARK, 0):
        if size - at < 8:
            raise ValueError("The stream does not end with its end mark: it is cut off or damaged.")
        message = _Message(file, at)
        blocks.get(message.kind, []).append(at)
        at = message.body + max(message.body_size, 0)
    if at + 8 != size:
        raise ValueError("The stream does not end with its end mark: it is cut off or damaged.")
    return blocks[_DICTIONARY], blocks[_RECORDS]
