"""Statistics of a pass over data: means, standard deviations, frequencies of words.

Both are sums of whole numbers, so they do not depend on the order of the records, on the size of batches, or
on which rank had which record: the bits of a fit are the same on any number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from karvan import ids
from karvan.features.ops.base import Op, expect_ids, expect_numbers
from karvan.features.ops.hashing import items_of
from karvan.features.ops.layout import as_text, is_text
from karvan.ragged import Entry, as_offsets, values_of


class RunningStatistics(ABC):
    """The statistics of all data that one step needs."""

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """Count the values of an entry."""

    @abstractmethod
    def state(self) -> Any:
        """All that has been counted, JSON-able."""

    @abstractmethod
    def merge(self, state: Any) -> None:
        """Add the counts of another rank."""


_BITS = 18  # of a limb: doubles can sum _CHUNK products of two limbs without rounding
_CHUNK = 1 << 16
_SCALE = 1100  # sums are in units of 2**-_SCALE, those of squares of 2**(-2 * _SCALE); no double is finer


class Moments(RunningStatistics):
    """Count, sum and sum of squares, which are exact; NaN is a missing value and does not count.

    Numbers are cut into limbs: integers of 18 bits, times a power of 2 that all numbers of a chunk share.
    Limbs and their products are summed in doubles while these are exact, and then in Python's integers,
    which have no limit.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0
        self._squares = 0
        self._pending: list[NDArray[np.float64]] = []  # fewer numbers than a chunk has
        self._pending_count = 0

    @override
    def add(self, entry: Entry) -> None:
        expect_numbers(entry)
        values = values_of(entry).detach().to("cpu", torch.float64).reshape(-1).numpy()
        numbers = values[~np.isnan(values)]
        if np.isinf(numbers).any():
            raise ValueError(
                "expected finite numbers, but received infinity; clip(low, high) before it sets limits."
            )
        self.count += len(numbers)
        self._pending.append(numbers)
        self._pending_count += len(numbers)
        if self._pending_count >= _CHUNK:
            self._add_pending()

    def _add_pending(self) -> None:
        if not self._pending_count:
            return
        values = np.concatenate(self._pending)
        self._pending, self._pending_count = [], 0
        for start in range(0, len(values), _CHUNK):
            self._add(values[start : start + _CHUNK])

    def _add(self, rest: NDArray[np.float64]) -> None:
        limbs: list[NDArray[np.float64]] = []
        shifts: list[int] = []
        while (largest := float(np.abs(rest).max())) > 0:
            shift = _BITS - math.frexp(largest)[1]
            limb = np.trunc(np.ldexp(rest, shift))
            rest = rest - np.ldexp(limb, -shift)
            limbs.append(limb)
            shifts.append(_SCALE - shift)
        if not limbs:
            return
        matrix = np.stack(limbs)
        self._sum += sum(int(total) << by for total, by in zip(matrix.sum(1), shifts, strict=True))
        for products, first in zip(matrix @ matrix.T, shifts, strict=True):
            self._squares += sum(int(p) << (first + by) for p, by in zip(products, shifts, strict=True))

    @override
    def state(self) -> Any:
        self._add_pending()
        return [self.count, hex(self._sum), hex(self._squares)]

    @override
    def merge(self, state: Any) -> None:
        count, total, squares = state
        self.count += count
        self._sum += int(total, 16)
        self._squares += int(squares, 16)

    @property
    def mean(self) -> float:
        """The mean, rounded once."""
        self._add_pending()
        return self._sum / (self.count << _SCALE)

    @property
    def std(self) -> float:
        """The standard deviation of all values; 1 where it is 0, so that a constant becomes 0, not NaN."""
        self._add_pending()
        above = self._squares * self.count - self._sum**2  # of units of 2**(-2 * _SCALE) / count**2
        bits = max(0, 64 - above.bit_length() // 2)  # so that the root has 64 bits or more
        return math.isqrt(above << 2 * bits) / (self.count << (_SCALE + bits)) or 1.0


class WordCounts(RunningStatistics):
    """How often each string, or each id, occurs. An empty string is a missing value and does not count."""

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()  # of bytes, or of ids
        self.text: bool | None = None  # whether words are strings; None as long as there is none

    def add(self, entry: Entry) -> None:
        """Only distinct words of an entry become Python objects."""
        entry = as_text(entry)
        if not is_text(entry):
            expect_ids(entry)
        if not values_of(entry).shape[0]:
            return
        self._expect(is_text(entry))
        if not self.text:
            words, times = np.unique(values_of(entry).cpu().numpy(), return_counts=True)
            self._count(words.tolist(), times.tolist())
            return
        items = items_of(entry)
        hashes = ids.farm(items).cpu().numpy()
        _, first, times = np.unique(hashes, return_index=True, return_counts=True)
        offsets, data = as_offsets(items).cpu().numpy(), items.values.cpu().numpy().tobytes()
        bounds = zip(offsets[first].tolist(), offsets[first + 1].tolist(), strict=True)
        self._count([data[start:end] for start, end in bounds], times.tolist())

    def _count(self, words: list[Any], times: list[int]) -> None:
        for word, count in zip(words, times, strict=True):
            if word != b"":
                self.counts[word] += count

    def _expect(self, text: bool) -> None:
        if self.text not in (None, text):
            raise ValueError("expected strings only or ids only, but received both.")
        self.text = text

    @override
    def state(self) -> Any:
        words = [[w.hex() if isinstance(w, bytes) else w, count] for w, count in self.counts.items()]
        return [self.text, words]

    @override
    def merge(self, state: Any) -> None:
        text, words = state
        if text is None:
            return
        self._expect(text)
        self._count([bytes.fromhex(word) if text else word for word, _ in words], [n for _, n in words])

    def most_frequent(self, at_most: int | None, min_count: int) -> tuple[bytes, ...] | tuple[int, ...]:
        """Words from the most frequent to the least, those of equal counts in the order of their values."""
        pairs = [(-count, word) for word, count in self.counts.items() if count >= min_count]
        return tuple(word for _, word in sorted(pairs)[:at_most])


# `FittedOp`: a step that learns from data, unless its values are passed as arguments.


class FittedOp(Op):
    """A step with numbers or words, which are arguments or computed by `FeatureEngine.fit`."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it has its numbers or words."""

    @abstractmethod
    def statistics(self) -> RunningStatistics:
        """Empty statistics of the kind that it needs."""

    @abstractmethod
    def fitted(self, statistics: RunningStatistics) -> Self:
        """The same step with the statistics that were found; a ValueError if there is too little data."""

    @abstractmethod
    def fit_state(self) -> Any:
        """The fitted values, as a tree with tensors; None before the fit."""

    @abstractmethod
    def with_state(self, state: Any) -> Self:
        """The same step with the values of a `fit_state`; a ValueError if it is from another kind of step."""
