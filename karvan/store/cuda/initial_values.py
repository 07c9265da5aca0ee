"""The numbers from which the kernels compute a table's initial vectors; csrc/table/init.h defines them."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right

import numpy as np
import torch

from karvan.kernels.ids import farm_rows
from karvan.store.types import TableSpec

_MASK = (1 << 64) - 1
KINDS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3, "gamma": 4, "poisson": 5}
# Coefficients of algorithm AS 241, from the highest power down: above and below the fraction line.
_CENTRAL = (
    (2509.0809287301227, 5226.495278852854),
    (33430.57558358813, 28729.085735721943),
    (67265.7709270087, 39307.89580009271),
    (45921.95393154987, 21213.794301586597),
    (13731.69376550946, 5394.196021424751),
    (1971.5909503065513, 687.1870074920579),
    (133.14166789178438, 42.31333070160091),
    (3.3871328727963665, 1.0),
)
_TAIL = (
    (0.0007745450142783414, 1.0507500716444169e-09),
    (0.022723844989269184, 0.0005475938084995345),
    (0.2417807251774506, 0.015198666563616457),
    (1.2704582524523684, 0.14810397642748008),
    (3.6478483247632045, 0.6897673349851),
    (5.769497221460691, 1.6763848301838038),
    (4.630337846156546, 2.053191626637759),
    (1.4234371107496835, 1.0),
)


def mix(key: int) -> int:
    """The key mix of csrc/hash/mix.h."""
    for last in (False, False, True):
        key ^= key >> 32
        if not last:
            key = (key * 0xD6E8FEB86659FD93) & _MASK
    return key


def table_stream(seed: int, name: str, device: torch.device) -> int:
    """What a table's initial vectors depend on beside the keys; waits for the device."""
    letters = torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)
    hashed = int(farm_rows(letters, torch.tensor([0, letters.numel()], device=device)))
    return mix((mix(seed & _MASK) + hashed) & _MASK)


def initial_numbers(spec: TableSpec, device: torch.device) -> tuple[list[int], list[float]]:
    """The stream, the kind and the range of a truncated normal; a, b, low, high and the largest value."""
    kind, a, b, low, high = spec.init
    a, b, low, high = (float(np.float32(x)) for x in (a, b, low, high))
    stream = table_stream(spec.seed, spec.name, device)
    top = max(np.float32(a), np.nextafter(np.float32(b), np.float32(-np.inf)))
    first = count = 0
    if kind == "truncated_normal":
        first, last = _inside(a, b, low, high)
        count = last - first + 1
    signed = stream - (1 << 64) if stream >> 63 else stream
    return [signed, KINDS[kind], first, count], [a, b, low, high, float(top)]


def _inside(a: float, b: float, low: float, high: float) -> tuple[int, int]:
    """The first and the last number whose normal value lies in [low, high]; values rise with numbers."""

    def value(x: int) -> float:
        return float(np.float32(a + b * _quantile(x)))

    numbers = range(1 << 32)
    first = min(bisect_left(numbers, low, key=value), len(numbers) - 1)
    return first, max(bisect_right(numbers, high, key=value), first + 1, 2) - 1


def _quantile(x: int) -> float:
    q = ((x ^ 0x80000000) - (0 if x >> 31 else 1 << 32) + 0.5) * 2.0**-32
    if abs(q) <= 0.425:
        above, below = _polynomials(0.180625 - q * q, _CENTRAL)
        return q * above / below
    above, below = _polynomials(math.sqrt(-_natural_log(0.5 - abs(q))) - 1.6, _TAIL)
    return -(above / below) if q < 0 else above / below


def _polynomials(r: float, coefficients: tuple[tuple[float, float], ...]) -> tuple[float, float]:
    above = below = 0.0
    for a, b in coefficients:
        above, below = above * r + a, below * r + b
    return above, below


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
