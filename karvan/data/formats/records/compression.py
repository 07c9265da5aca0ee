"""Decompression of record files, within bounds."""

from __future__ import annotations

import zlib
from typing import Protocol

import pyarrow as pa

from karvan.data.errors import DataError
from karvan.native import _native

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


# Snappy's frames: the stream format of Go's writer, around blocks for which pyarrow has a codec.
#
# A stream is a sequence of frames, each a byte for its type, the size of its content in 3 bytes, and the
# content. The first one is `ff`, "sNaPpY". Data is in frames `00` (a Snappy block) and `01` (uncompressed):
# the masked CRC-32C of the data before compression, then up to 65,536 bytes of it. Others from `80` on may
# be skipped.


_START = b"\xff\x06\0\0sNaPpY"
_SNAPPY_BLOCK, _PLAIN, _SKIPPED_FROM = 0x00, 0x01, 0x80
_MOST = 1 << 16


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
            if len(plain) > _MOST or _native.masked_crc32c(plain) != int.from_bytes(
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
    for at in range(0, len(data), _MOST):
        plain = data[at : at + _MOST]
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
    if size > _MOST:
        raise ValueError("A frame of Snappy holds more than 65,536 bytes.")
    try:
        plain: bytes = codec.decompress(block, size, asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError("A block of Snappy is damaged.") from error
    return plain
