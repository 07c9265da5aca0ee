"""The stripes of an ORC file, read from its tail.

The tail is a protobuf message; https://orc.apache.org/specification/ORCv1 has its fields. It is checked
before pyarrow builds a schema of it, since damaged types can crash the process.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyarrow import orc

_DECIMAL, _MOST_DIGITS = 14, 38


@dataclass(frozen=True, slots=True)
class Stripe:
    """How many records a stripe has, and its first and last byte; `tail` is where the file's tail begins."""

    records: int
    begin: int
    end: int
    tail: int

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.end - self.begin


def stripes(opened: orc.ORCFile, size: int) -> list[Stripe]:
    """The stripes of a file of `size` bytes; raises a ValueError if they are inconsistent."""
    message = bytes(opened.reader.serialized_file_tail())
    footers = _parts(message, 2)
    for type_ in (type_ for footer in footers for type_ in _parts(footer, 4)):
        if _number(type_, 1) == _DECIMAL and _number(type_, 5) > _MOST_DIGITS:
            raise ValueError(f"A decimal has {_number(type_, 5)} digits, but {_MOST_DIGITS} are the most.")
    found = []
    for stripe in (stripe for footer in footers for stripe in _parts(footer, 3)):
        begin = _number(stripe, 1)
        end = begin + sum(_number(stripe, part) for part in (2, 3, 4))  # index, data, footer
        found.append((_number(stripe, 5), begin, end))
    tail = max((end for _, _, end in found), default=0)
    records = sum(count for count, _, _ in found)
    if len(found) != opened.nstripes or records != opened.nrows:
        raise ValueError(
            f"The footer counts {opened.nrows} records in {opened.nstripes} stripes, "
            f"but lists {records} in {len(found)}."
        )
    if tail > size:
        raise ValueError(f"The footer lists a stripe up to byte {tail}, but the file has {size}.")
    return [Stripe(*fields, tail) for fields in found]


def _parts(message: bytes, field: int) -> list[bytes]:
    """The values of a repeated field that are messages themselves."""
    return [value for number, value in _fields(message) if number == field and isinstance(value, bytes)]


def _number(message: bytes, field: int) -> int:
    """The value of a field that is a number; 0 where it is missing."""
    values = [value for number, value in _fields(message) if number == field and isinstance(value, int)]
    return values[-1] if values else 0


def _fields(message: bytes) -> list[tuple[int, int | bytes]]:
    """All fields of a message: number and value."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = message[at : at + size], at + size
        else:
            raise ValueError("The footer cannot be read.")
        found.append((tag >> 3, value))
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("The footer ends too early.")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
