"""Snappy's frames: the stream format of Go's writer, around blocks for which pyarrow has a codec.

A stream is a sequence of frames, each a byte for its type, the size of its content in 3 bytes, and the
content. The first one is `ff`, "sNaPpY". Data is in frames `00` (a Snappy block) and `01` (uncompressed): the
masked CRC-32C of the data before compression, then up to 65,536 bytes of it. Others from `80` on may be
skipped.
"""

from __future__ import annotations

import pyarrow as pa

from karvan.native import _native

_START = b"\xff\x06\0\0sNaPpY"
_BLOCK, _PLAIN, _SKIPPED_FROM = 0x00, 0x01, 0x80
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
        if kind in (_BLOCK, _PLAIN):
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
        kind, content = (_BLOCK, block) if len(block) < len(plain) - len(plain) // 8 else (_PLAIN, plain)
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
