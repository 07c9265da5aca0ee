"""The numbers from which the kernels compute a table's initial vectors; csrc/table/init.h defines them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np

from karvan.store.types import TableSpec

# FarmHash Fingerprint64 in plain Python, for the names of tables: their initial vectors depend on it.


_MASK = (1 << 64) - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F


def _fetch(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _rotate(value: int, by: int) -> int:
    return ((value >> by) | (value << (64 - by))) & _MASK


def _shift_mix(value: int) -> int:
    return value ^ (value >> 47)


def _pair(u: int, v: int, factor: int) -> int:
    a = ((u ^ v) * factor) & _MASK
    a ^= a >> 47
    b = ((v ^ a) * factor) & _MASK
    b ^= b >> 47
    return (b * factor) & _MASK


def _short(data: bytes) -> int:
    size = len(data)
    factor = _K2 + size * 2
    if size >= 8:
        a = (_fetch(data, 0) + _K2) & _MASK
        b = _fetch(data, size - 8)
        c = (_rotate(b, 37) * factor + a) & _MASK
        d = ((_rotate(a, 25) + b) * factor) & _MASK
        return _pair(c, d, factor)
    if size >= 4:
        return _pair(size + (_fetch(data, 0, 4) << 3), _fetch(data, size - 4, 4), factor)
    if size > 0:
        y = data[0] + (data[size >> 1] << 8)
        z = size + (data[size - 1] << 2)
        return (_shift_mix((y * _K2 ^ z * _K0) & _MASK) * _K2) & _MASK
    return _K2


def _medium(data: bytes) -> int:  # 17 to 32 bytes
    size = len(data)
    factor = (_K2 + size * 2) & _MASK
    a = (_fetch(data, 0) * _K1) & _MASK
    b = _fetch(data, 8)
    c = (_fetch(data, size - 8) * factor) & _MASK
    d = (_fetch(data, size - 16) * _K2) & _MASK
    first = (_rotate((a + b) & _MASK, 43) + _rotate(c, 30) + d) & _MASK
    second = (a + _rotate((b + _K2) & _MASK, 18) + c) & _MASK
    return _pair(first, second, factor)


def _long(data: bytes) -> int:  # 33 to 64 bytes
    size = len(data)
    factor = (_K2 + size * 2) & _MASK
    a = (_fetch(data, 0) * _K2) & _MASK
    b = _fetch(data, 8)
    c = (_fetch(data, size - 8) * factor) & _MASK
    d = (_fetch(data, size - 16) * _K2) & _MASK
    y = (_rotate((a + b) & _MASK, 43) + _rotate(c, 30) + d) & _MASK
    z = _pair(y, (a + _rotate((b + _K2) & _MASK, 18) + c) & _MASK, factor)
    e = (_fetch(data, 16) * factor) & _MASK
    f = _fetch(data, 24)
    g = ((y + _fetch(data, size - 32)) * factor) & _MASK
    h = ((z + _fetch(data, size - 24)) * factor) & _MASK
    first = (_rotate((e + f) & _MASK, 43) + _rotate(g, 30) + h) & _MASK
    return _pair(first, (e + _rotate((f + a) & _MASK, 18) + g) & _MASK, factor)


def _weak(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_fetch(data, at + 8 * i) for i in range(4))
    a = (a + w) & _MASK
    b = _rotate((b + a + z) & _MASK, 21)
    c = a
    a = (a + x + y) & _MASK
    b = (b + _rotate(a, 44)) & _MASK
    return (a + z) & _MASK, (b + c) & _MASK


def fingerprint64(data: bytes) -> int:
    """The 64-bit fingerprint of a string."""
    size = len(data)
    if size <= 16:
        return _short(data)
    if size <= 32:
        return _medium(data)
    if size <= 64:
        return _long(data)
    seed = 81
    x = seed
    y = (seed * _K1 + 113) & _MASK
    z = (_shift_mix((y * _K2 + 113) & _MASK) * _K2) & _MASK
    v, w = (0, 0), (0, 0)
    x = (x * _K2 + _fetch(data, 0)) & _MASK
    end = (size - 1) // 64 * 64
    last = end + ((size - 1) & 63) - 63
    for at in range(0, end, 64):
        x = (_rotate((x + y + v[0] + _fetch(data, at + 8)) & _MASK, 37) * _K1) & _MASK
        y = (_rotate((y + v[1] + _fetch(data, at + 48)) & _MASK, 42) * _K1) & _MASK
        x ^= w[1]
        y = (y + v[0] + _fetch(data, at + 40)) & _MASK
        z = (_rotate((z + w[0]) & _MASK, 33) * _K1) & _MASK
        v = _weak(data, at, (v[1] * _K1) & _MASK, (x + w[0]) & _MASK)
        w = _weak(data, at + 32, (z + w[1]) & _MASK, (y + _fetch(data, at + 16)) & _MASK)
        z, x = x, z
    factor = (_K1 + ((z & 0xFF) << 1)) & _MASK
    w = ((w[0] + ((size - 1) & 63)) & _MASK, w[1])
    v = ((v[0] + w[0]) & _MASK, v[1])
    w = ((w[0] + v[0]) & _MASK, w[1])
    x = (_rotate((x + y + v[0] + _fetch(data, last + 8)) & _MASK, 37) * factor) & _MASK
    y = (_rotate((y + v[1] + _fetch(data, last + 48)) & _MASK, 42) * factor) & _MASK
    x ^= (w[1] * 9) & _MASK
    y = (y + v[0] * 9 + _fetch(data, last + 40)) & _MASK
    z = (_rotate((z + w[0]) & _MASK, 33) * factor) & _MASK
    v = _weak(data, last, (v[1] * factor) & _MASK, (x + w[0]) & _MASK)
    w = _weak(data, last + 32, (z + w[1]) & _MASK, (y + _fetch(data, last + 16)) & _MASK)
    z, x = x, z
    first = (_pair(v[0], w[0], factor) + _shift_mix(y) * _K0 + z) & _MASK
    return _pair(first, (_pair(v[1], w[1], factor) + x) & _MASK, factor)


KINDS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3, "gamma": 4, "poisson": 5}
# Coefficients of algorithm AS 241, from the highest power down: above and below the fraction line.
_CENTRAL_ABOVE = (
    2509.0809287301227,
    33430.57558358813,
    67265.7709270087,
    45921.95393154987,
    13731.69376550946,
    1971.5909503065513,
    133.14166789178438,
    3.3871328727963665,
)
_CENTRAL_BELOW = (
    5226.495278852854,
    28729.085735721943,
    39307.89580009271,
    21213.794301586597,
    5394.196021424751,
    687.1870074920579,
    42.31333070160091,
    1.0,
)
_TAIL_ABOVE = (
    0.0007745450142783414,
    0.022723844989269184,
    0.2417807251774506,
    1.2704582524523684,
    3.6478483247632045,
    5.769497221460691,
    4.630337846156546,
    1.4234371107496835,
)
_TAIL_BELOW = (
    1.0507500716444169e-09,
    0.0005475938084995345,
    0.015198666563616457,
    0.14810397642748008,
    0.6897673349851,
    1.6763848301838038,
    2.053191626637759,
    1.0,
)


def mix(key: int) -> int:
    """The key mix of csrc/hash/mix.h."""
    for last in (False, False, True):
        key ^= key >> 32
        if not last:
            key = (key * 0xD6E8FEB86659FD93) & _MASK
    return key


def table_stream(seed: int, name: str) -> int:
    """What a table's initial vectors depend on beside the keys."""
    return mix((mix(seed & _MASK) + fingerprint64(name.encode())) & _MASK)


def initial_numbers(spec: TableSpec) -> tuple[list[int], list[float]]:
    """The stream, the kind and the range of a truncated normal; a, b, low, high and the largest value."""
    kind, a, b, low, high = spec.init
    a, b, low, high = (float(np.float32(x)) for x in (a, b, low, high))
    stream = table_stream(spec.seed, spec.name)
    top = max(np.float32(a), np.nextafter(np.float32(b), np.float32(-np.inf)))
    first = count = 0
    if kind == "truncated_normal":
        first, last = _inside(a, b, low, high)
        count = last - first + 1
    signed = stream - (1 << 64) if stream >> 63 else stream
    return [signed, KINDS[kind], first, count], [a, b, low, high, float(top)]


def _inside(a: float, b: float, low: float, high: float) -> tuple[int, int]:
    """The first and the last number whose normal value lies in [low, high]."""
    most = (1 << 32) - 1
    inside = _first_where(lambda x: _value(a, b, x) >= low)
    above = _first_where(lambda x: _value(a, b, x) > high)
    first = min(inside, most)
    return first, max(above, first + 1, 2) - 1


def _first_where(condition: Callable[[int], bool]) -> int:
    low, high = 0, 1 << 32
    while low < high:
        middle = (low + high) // 2
        if condition(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _value(a: float, b: float, x: int) -> float:
    return float(np.float32(a + b * _quantile(x)))


def _quantile(x: int) -> float:
    q = ((x ^ 0x80000000) - (0 if x >> 31 else 1 << 32) + 0.5) * 2.0**-32
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * _horner(r, _CENTRAL_ABOVE) / _horner(r, _CENTRAL_BELOW)
    r = math.sqrt(-_natural_log(0.5 - abs(q))) - 1.6
    value = _horner(r, _TAIL_ABOVE) / _horner(r, _TAIL_BELOW)
    return -value if q < 0 else value


def _horner(r: float, coefficients: tuple[float, ...]) -> float:
    total = coefficients[0]
    for coefficient in coefficients[1:]:
        total = total * r + coefficient
    return total


def _natural_log(u: float) -> float:
    bits: int
    m: float
    (bits,) = struct.unpack("<q", struct.pack("<d", u))
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    (m,) = struct.unpack("<d", struct.pack("<q", bits - (exponent << 52)))
    s = (m - 1) / (m + 1)
    square = s * s
    total = 1.0 / 19
    for power in range(17, 0, -2):
        total = total * square + 1.0 / power
    return float(exponent) * 0.693147180559945309417 + 2 * s * total
