"""TFRecord, RecordIO, Snappy's frames and tf.Example, written and read the slow and obvious way."""

import gzip
import struct
import zlib

import pyarrow as pa

MAGIC = 0x01020304


def crc32c(data):
    """Bit by bit, with the reflected polynomial of Castagnoli."""
    rest = 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def write_tfrecords(records):
    made = b""
    for record in records:
        length = struct.pack("<Q", len(record))
        made += length + struct.pack("<I", masked(length)) + record + struct.pack("<I", masked(record))
    return made


def read_tfrecords(data):
    records = []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        records.append(data[12 : 12 + size])
        assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked(records[-1])
        data = data[16 + size :]
    return records


def write_snappy_frames(pieces):
    """A frame for each piece, every other one a Snappy block: Go's writer makes one for each write."""
    made = b"\xff\x06\x00\x00sNaPpY"
    for number, piece in enumerate(pieces):
        content = pa.Codec("snappy").compress(piece, asbytes=True) if number % 2 else piece
        made += bytes([0 if number % 2 else 1]) + struct.pack("<I", len(content) + 4)[:3]
        made += struct.pack("<I", masked(piece)) + content
    return made


def read_snappy_frames(data):
    assert data[:10] == b"\xff\x06\x00\x00sNaPpY"
    data, made = data[10:], b""
    while data:
        size = struct.unpack("<I", data[1:4] + b"\0")[0]
        content = data[8 : 4 + size]
        if data[0] == 0:
            plain, shift = 0, 0
            for byte in content:
                plain |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            content = pa.Codec("snappy").decompress(content, plain, asbytes=True)
        else:
            assert data[0] == 1
        assert struct.unpack("<I", data[4:8])[0] == masked(content)
        made += content
        data = data[4 + size :]
    return made


def write_recordio(chunks, compressor):
    made = b""
    for records in chunks:
        pieces = [piece for record in records for piece in (struct.pack("<I", len(record)), record)]
        if compressor == 1:
            data = write_snappy_frames(pieces)
        else:
            data = gzip.compress(b"".join(pieces)) if compressor == 2 else b"".join(pieces)
        made += struct.pack("<IIIII", MAGIC, zlib.crc32(data), compressor, len(data), len(records)) + data
    return made


def read_recordio(data):
    chunks = []
    while data:
        magic, crc, compressor, size, count = struct.unpack("<IIIII", data[:20])
        stored, data = data[20 : 20 + size], data[20 + size :]
        assert (magic, crc) == (MAGIC, zlib.crc32(stored))
        plain = [lambda x: x, read_snappy_frames, gzip.decompress][compressor](stored)
        records = []
        for _ in range(count):
            (length,) = struct.unpack("<I", plain[:4])
            records.append(plain[4 : 4 + length])
            plain = plain[4 + length :]
        assert plain == b""
        chunks.append(records)
    return chunks


def varint(value):
    value %= 1 << 64
    made = b""
    while value >= 128:
        made += bytes([value % 128 + 128])
        value //= 128
    return made + bytes([value])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(values, packed=True):
    """A Feature of bytes, floats or integers, by the type of the values; (kind, []) for an empty list."""
    if isinstance(values, tuple):
        return field({"bytes": 1, "floats": 2, "integers": 3}[values[0]], b"")
    if isinstance(values[0], bytes):
        return field(1, b"".join(field(1, value) for value in values))
    if isinstance(values[0], float):
        if packed:
            return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        return field(2, b"".join(b"\x0d" + struct.pack("<f", value) for value in values))
    if packed:
        return field(3, field(1, b"".join(map(varint, values))))
    return field(3, b"".join(b"\x08" + varint(value) for value in values))


def write_example(features, packed=True):
    """A tf.Example of lists by name; None is a feature without a list."""
    entries = [
        field(1, field(1, name.encode()) + field(2, b"" if values is None else feature(values, packed)))
        for name, values in features.items()
    ]
    return field(1, b"".join(entries))
