"""Files compressed as a whole with gzip or zlib, read from their beginning.

A few bytes may stand for a thousand times as many. So nobody asks for as many as a record claims to have
without `check_record`.
"""

from __future__ import annotations

import zlib
from typing import Protocol

from karvan.data.errors import DataError

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
        left = size
        while left:
            piece = self._next(left)
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
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
