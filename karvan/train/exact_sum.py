"""`ExactSum`: a sum of floats without rounding, so that neither their order nor who has added them matters.

It is a few floats that do not overlap (Shewchuk, 1997), whose sum is that of all that were added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class ExactSum:
    """A sum of floats; infinities and NaN are added as usual."""

    def __init__(self) -> None:
        self._parts: list[float] = []
        self._special = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        if not math.isfinite(value):
            self._special += value
            return
        parts = []
        for part in self._parts:
            if abs(value) < abs(part):
                value, part = part, value
            high = value + part
            if low := part - (high - value):
                parts.append(low)
            value = high
        self._parts = [*parts, value]

    def parts(self) -> list[float]:
        """Numbers with the same sum, for `total`, here or elsewhere."""
        return [*self._parts, self._special]


def total(parts: Iterable[float]) -> float:
    """The sum of the parts of some sums, rounded once."""
    listed = list(parts)
    finite = [part for part in listed if math.isfinite(part)]
    return math.fsum(finite) + sum(part for part in listed if not math.isfinite(part))
