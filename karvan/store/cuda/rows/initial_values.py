"""The numbers from which the kernels compute a table's initial vectors; csrc/table/init.h defines them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np

from karvan.store.cuda.rows.farm import fingerprint64
from karvan.store.types import TableSpec

KINDS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3, "gamma": 4, "poisson": 5}
_MASK = (1 << 64) - 1
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
