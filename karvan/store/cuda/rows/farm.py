"""FarmHash Fingerprint64 in plain Python, for the names of tables: their initial vectors depend on it."""

from __future__ import annotations

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
