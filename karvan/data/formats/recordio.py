"""RecordIO as ElasticDL has it: the files of github.com/wangkuiyi/recordio and its Python package.

    file  = chunks
    chunk = u32 0x01020304, u32 CRC-32 of the data as stored, u32 compressor (0 none, 1 Snappy, 2 gzip),
            u32 size of the data as stored, u32 number of records, data
    data  = for each record, once decompressed: u32 length, bytes

A chunk of gzip may decompress to 32 MiB, or to 32 times its size if that is more: a few bytes must not fill
the memory. What compresses better is stored without compression.

All numbers are little-endian, and Snappy is its stream of frames (below). The number of records
has no checksum; it is compared with the records in the data. An early Python writer and PaddlePaddle's C++
writer use the same magic number with the fields in another order; the error for such files explains that.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyarrow import fs

from karvan.data.errors import DataError
from karvan.data.formats.paths import PathLike
from karvan.data.formats.record_files import (
    RUN,
    ByteStream,
    Index,
    InflatedFile,
    RecordFileWriter,
    RecordSource,
    check_record,
)
from karvan.data.formats.tf_example import Bytes, Payloads, Places
from karvan.native import _native

_MAGIC = b"\x04\x03\x02\x01"
_HEAD = struct.Struct("<4sIIII")
_COMPRESSORS = {"none": 0, "snappy": 1, "gzip": 2}
_CHUNK = 1 << 20
_MOST, _MOST_TIMES = 32 << 20, 32  # bytes of a chunk, once decompressed; Snappy cannot reach them
_OTHER_ORDER = (
    "Expected the header that kv.data.RecordIOWriter writes, got fields in the order of PaddlePaddle's "
    "C++ writer or of an early Python writer (count, checksum, compressor, size). Write the records with "
    "kv.data.RecordIOWriter."
)


@dataclass(frozen=True)
class _Head:
    checksum: int
    compressor: int
    size: int
    records: int
    place: str

    @classmethod
    def parse(cls, data: bytes, at: int, first: int) -> _Head:
        place = f"record {first}, chunk at byte {at}"
        if len(data) < _HEAD.size:
            raise DataError("The header of the chunk is cut off.", place=place)
        magic, checksum, compressor, size, records = _HEAD.unpack(data)
        if magic != _MAGIC:
            raise DataError(
                f"Expected a chunk, which begins with {_MAGIC.hex()}, but it is {magic.hex()}: the file is "
                "damaged.",
                place=place,
            )
        if compressor > 2:
            early = checksum < 1 << 24 and size <= 3  # a count and a compressor
            detail = f"The compressor must be 0, 1 or 2, but is {compressor}: the file is damaged."
            raise DataError(_OTHER_ORDER if early else detail, place=place)
        head = cls(checksum, compressor, size, records, place)
        if records > (head.most_records if compressor else size // 4):
            raise DataError(f"The chunk cannot hold {records} records: it is damaged.", place=place)
        return head

    @property
    def most_bytes(self) -> int:
        """How many bytes its data may have, once decompressed."""
        return max(_MOST, _MOST_TIMES * self.size)

    @property
    def most_records(self) -> int:
        """How many records it may have, if it is compressed: their places take 16 bytes each."""
        return self.most_bytes // 32


class RecordIOSource(RecordSource):
    """RecordIO files; see `RecordSource` for what the records may hold. Runs consist of complete chunks."""

    format_name = "RecordIO"

    def _is_plain(self, start: bytes) -> bool:
        return start.startswith(_MAGIC)

    def _find_runs(self, file: pa.NativeFile) -> Index:
        size = file.size()
        bounds, starts = [0], [0]
        at = total = 0
        while at < size:
            file.seek(at)
            head = _Head.parse(file.read(_HEAD.size), at, total)
            if head.size > size - at - _HEAD.size:
                raise DataError("The chunk is cut off: the file ends before it does.", place=head.place)
            at += _HEAD.size + head.size
            total += head.records
            if at - bounds[-1] >= RUN or at == size:
                bounds.append(at)
                starts.append(total)
        return Index(np.array(bounds, np.int64), np.array(starts, np.int64))

    def _read_run(self, data: bytes, at: int, first: int) -> Iterator[Payloads]:
        position = 0
        parts: list[Payloads] = []
        while position < len(data):
            head = _Head.parse(data[position : position + _HEAD.size], at + position, first)
            begin, position = position + _HEAD.size, position + _HEAD.size + head.size
            parts.append(_records(head, data[begin:position], first))
            first += head.records
            if sum(len(part.data) for part in parts) > 4 * RUN:
                yield _joined(parts)
                parts = []
        if parts:
            yield _joined(parts)

    def _scan(self, stream: ByteStream) -> Iterator[Payloads]:
        at = first = 0
        while data := stream.read(_HEAD.size):
            head = _Head.parse(data, at, first)
            check_record(head.size, head.place)
            stored = stream.read(head.size)
            if len(stored) != head.size:
                raise DataError("The chunk is cut off: the file ends before it does.", place=head.place)
            yield _records(head, stored, first)
            at += _HEAD.size + head.size
            first += head.records


class RecordIOWriter(RecordFileWriter):
    """Write a RecordIO file.

    `write` takes bytes; `write_rows` takes tables, and their rows become tf.Example records. Use it in a
    `with` block: the file appears when it ends without an error.

    Args:
        path: The file. If its name ends in `.gz`, all of it is compressed, and it can no longer be read in
            parts.
        compression: Of each chunk: "snappy", "gzip" or "none".
        filesystem: A pyarrow file system that gets the file.
        chunk_bytes: The size of a chunk, up to 32 MiB.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> with kv.data.RecordIOWriter("one.recordio") as writer:
        ...     writer.write(b"one")
    """

    def __init__(
        self,
        path: PathLike,
        compression: str = "snappy",
        filesystem: fs.FileSystem | None = None,
        *,
        chunk_bytes: int = _CHUNK,
    ) -> None:
        if compression not in _COMPRESSORS:
            raise ValueError(f"compression must be 'snappy', 'gzip' or 'none', but is {compression!r}.")
        if not 1 <= chunk_bytes <= _MOST:
            raise ValueError(f"chunk_bytes must be from 1 to 32 MiB, but is {chunk_bytes}.")
        self._compression = compression
        file_compression = "gzip" if str(path).lower().endswith(".gz") else None
        super().__init__(path, filesystem, file_compression, chunk_bytes)

    def _frame(self, data: Bytes, bounds: Places) -> bytes:
        plain = bytes(_native.frame_chunk_records(data, bounds))
        if self._compression == "snappy":
            stored = frame(plain)
        else:
            stored = gzip.compress(plain, mtime=0) if self._compression == "gzip" else plain
        head = _Head(zlib.crc32(stored), _COMPRESSORS[self._compression], len(stored), len(bounds) - 1, "")
        if len(plain) > head.most_bytes or head.records > head.most_records:
            stored, head = plain, replace(head, checksum=zlib.crc32(plain), compressor=0, size=len(plain))
        if self._is_deflated:
            check_record(head.size)
        return _HEAD.pack(_MAGIC, head.checksum, head.compressor, head.size, head.records) + stored


def _records(head: _Head, stored: bytes, first: int) -> Payloads:
    if zlib.crc32(stored) != head.checksum:
        raise DataError("The chunk does not match its checksum: the file is damaged.", place=head.place)
    try:
        data = _decompressed(head, stored)
    except ValueError as error:
        raise DataError(f"The chunk cannot be decompressed: {error}", place=head.place) from error
    starts, lengths, _, fault = _native.find_chunk_records(data, head.records)
    if fault:
        raise DataError(
            f"Expected {head.records} records that fill the chunk, but its data has other lengths: "
            "the file is damaged.",
            place=head.place,
        )
    return Payloads(np.frombuffer(data, np.uint8), starts, lengths, first)


def _decompressed(head: _Head, stored: bytes) -> bytes:
    if head.compressor == _COMPRESSORS["none"]:
        return stored
    if head.compressor == _COMPRESSORS["snappy"]:
        return unframe(stored)
    data = InflatedFile(io.BytesIO(stored)).read(head.most_bytes + 1)
    if len(data) > head.most_bytes:
        raise ValueError(f"expected at most {head.most_bytes:,} bytes of {len(stored):,}, got more.")
    return data


def _joined(parts: list[Payloads]) -> Payloads:
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([0, *(len(part.data) for part in parts)])
    starts = [part.starts + shift for part, shift in zip(parts, ends.tolist(), strict=False)]
    data = np.concatenate([part.data for part in parts])
    return Payloads(
        data, np.concatenate(starts), np.concatenate([part.lengths for part in parts]), parts[0].first
    )


# Snappy's frames: the stream format of Go's writer, around blocks for which pyarrow has a codec.
#
# A stream is a sequence of frames, each a byte for its type, the size of its content in 3 bytes, and the
# content. The first one is `ff`, "sNaPpY". Data is in frames `00` (a Snappy block) and `01` (uncompressed):
# the masked CRC-32C of the data before compression, then up to 65,536 bytes of it. Others from `80` on may
# be skipped.


_START = b"\xff\x06\0\0sNaPpY"
_SNAPPY_BLOCK, _PLAIN, _SKIPPED_FROM = 0x00, 0x01, 0x80
_MOST_OF_FRAME = 1 << 16


def unframe(data: bytes) -> bytes:
    """The bytes of a stream; a ValueError if they are no stream, cut off or damaged."""
    if not data.startswith(_START):
        raise ValueError("The data does not begin with the header of a Snappy stream.")
    codec = pa.Codec("snappy")
    pieces: list[bytes] = []
    at, end = len(_START), len(data)
    while at < end:
        kind, size = data[at], int.from_bytes(data[at + 1 : at + 4], "little")
        begin, at = at + 4, at + 4 + size
        if at > end:
            raise ValueError("A frame of Snappy extends beyond the data.")
        if kind in (_SNAPPY_BLOCK, _PLAIN):
            content = data[begin + 4 : at]
            if size < 4:
                raise ValueError("A frame of Snappy is too short for its checksum.")
            plain = content if kind == _PLAIN else _decompress(codec, content)
            if len(plain) > _MOST_OF_FRAME or _native.masked_crc32c(plain) != int.from_bytes(
                data[begin : begin + 4], "little"
            ):
                raise ValueError("A frame of Snappy does not match its checksum.")
            pieces.append(plain)
        elif kind < _SKIPPED_FROM:
            raise ValueError(f"A frame of Snappy has the unknown type {kind}.")
    return b"".join(pieces)


def frame(data: bytes) -> bytes:
    """A stream of these bytes."""
    codec = pa.Codec("snappy")
    pieces = [_START]
    for at in range(0, len(data), _MOST_OF_FRAME):
        plain = data[at : at + _MOST_OF_FRAME]
        block = codec.compress(plain, asbytes=True)
        kind, content = (
            (_SNAPPY_BLOCK, block) if len(block) < len(plain) - len(plain) // 8 else (_PLAIN, plain)
        )
        pieces.append(bytes([kind]) + (len(content) + 4).to_bytes(3, "little"))
        pieces.append(_native.masked_crc32c(plain).to_bytes(4, "little"))
        pieces.append(content)
    return b"".join(pieces)


def _decompress(codec: pa.Codec, block: bytes) -> bytes:
    size = shift = 0
    for byte in block[:3]:  # the size of what it holds, 7 bits in each byte
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if size > _MOST_OF_FRAME:
        raise ValueError("A frame of Snappy holds more than 65,536 bytes.")
    try:
        plain: bytes = codec.decompress(block, size, asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError("A block of Snappy is damaged.") from error
    return plain
