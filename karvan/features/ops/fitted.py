"""Statistics of a pass over data: means, standard deviations, frequencies of words.

Both are sums of whole numbers, so they do not depend on the order of the records, on the size of batches, or
on which rank had which record: the bits of a fit are the same on any number of ranks.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan import ids
from karvan.features.ops.base import Op, as_text, describe, expect_ids, expect_numbers, is_text
from karvan.features.ops.ids import StringOp, items_of
from karvan.ragged import Entry, Ragged, as_offsets, values_of


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


# Vocabulary lookup: the index of a string or id in a list, and buckets for unknown ones.


@dataclass(frozen=True)
class Vocabulary(StringOp, FittedOp):
    """The index of known strings (or ids) in the list; others are in `oov` buckets after it.

    Without buckets, `oov` 0, they are -1.

    Without words, the engine's `fit` finds those that occur `min_count` times or more, and takes the
    `max_words` most frequent. The most frequent word is the first; words of equal counts are in the order of
    their bytes or values, so that the list does not depend on the order of the data.

    Strings are found by their FarmHash and confirmed by their MurmurHash: 128 bits, without comparing text.
    """

    words: tuple[bytes, ...] | tuple[int, ...] | None
    oov: int
    max_words: int | None = None
    min_count: int = 1
    name: ClassVar[str] = "vocabulary"

    def __post_init__(self) -> None:
        if self.max_words is not None and self.max_words < 1:
            raise ValueError(f"vocabulary expects max_words of at least 1, but received {self.max_words}.")
        if self.min_count < 1:
            raise ValueError(f"vocabulary expects min_count of at least 1, but received {self.min_count}.")
        if self.words is not None and not self.words:
            raise ValueError("vocabulary expects at least one word, but received none.")
        if self.oov < 0:
            raise ValueError(
                f"vocabulary expects 0 or more buckets for words it does not know, but received {self.oov}."
            )
        if self.words is not None and len(set(self.words)) != len(self.words):
            twice = next(word for word, times in Counter(self.words).items() if times > 1)
            raise ValueError(f"vocabulary expects each word once, but received {twice!r} twice.")
        # Hashing the entire list whenever ops are grouped would cost more than the lookup.
        object.__setattr__(self, "_hash", hash((self.words, self.oov, self.max_words, self.min_count)))

    def __hash__(self) -> int:
        return int(self.__dict__["_hash"])

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[object, ...]]:
        # The hash of a string differs from process to process, so it must not be pickled.
        return (Vocabulary, (self.words, self.oov, self.max_words, self.min_count))

    @property
    @override
    def ready(self) -> bool:
        return self.words is not None

    @override
    def statistics(self) -> WordCounts:
        return WordCounts()

    @override
    def fitted(self, statistics: RunningStatistics) -> Vocabulary:
        assert isinstance(statistics, WordCounts)
        words = statistics.most_frequent(self.max_words, self.min_count)
        if not words:
            often = f" {self.min_count} times or more" if self.min_count > 1 else ""
            raise ValueError(f"expected words{often} to fit, but there were none.")
        return replace(self, words=words)

    def fit_state(self) -> Any:
        """Ids as a tensor, strings as their bytes and offsets."""
        if self.words is None:
            return None
        if isinstance(self.words[0], int):
            return {"ids": torch.tensor(self.words)}
        joined = b"".join(self.words)
        lengths = torch.tensor([0, *(len(word) for word in self.words)])
        data = torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.empty(0)
        return {"bytes": data.to(torch.uint8), "offsets": lengths.cumsum(0)}

    @override
    def with_state(self, state: Any) -> Vocabulary:
        if isinstance(state, dict) and state.keys() == {"ids"}:
            return replace(self, words=tuple(state["ids"].tolist()))
        if not isinstance(state, dict) or state.keys() != {"bytes", "offsets"}:
            raise ValueError(f"expected the words of a vocabulary, but received {type(state).__name__}.")
        data, bounds = state["bytes"].cpu().numpy().tobytes(), state["offsets"].tolist()
        return replace(self, words=tuple(data[a:b] for a, b in pairwise(bounds)))

    def check(self, *entries: Entry) -> None:
        """Strings for words, ids for ids."""
        super().check(*entries)
        if self.words is None:
            raise ValueError("there are no words yet: pass some, or call the engine's fit.")
        if is_text(entries[0]) != isinstance(self.words[0], bytes):
            expected = "strings, as its words are," if isinstance(self.words[0], bytes) else "ids, as its own"
            raise TypeError(f"expected {expected} but received {describe(entries[0])}.")

    def compute(self, items: Ragged) -> Tensor:
        """The indices of known items, and buckets of the others by their FarmHash, or -1."""
        assert self.words is not None
        farm, murmur, index = _index(self, items.values.device)
        hashed = ids.farm(items)
        at = torch.searchsorted(farm, hashed).clamp_(max=farm.shape[0] - 1)
        same = (farm[at] == hashed) & (murmur[at] == ids.murmur(items))
        unknown = ids.mod(hashed, self.oov) + len(self.words) if self.oov else -1
        return torch.where(same, index[at], unknown)


def words_from_file(file: str | PathLike[str]) -> tuple[bytes, ...]:
    """The lines of a text file, without what ends them."""
    path = Path(file)
    words = tuple(line.removesuffix(b"\r") for line in path.read_bytes().removesuffix(b"\n").split(b"\n"))
    numbers: dict[bytes, int] = {}
    for number, word in enumerate(words, 1):
        if not word:
            raise ValueError(
                f"vocabulary: expected a word on each line, but line {number} of {path} has none."
            )
        if (first := numbers.setdefault(word, number)) != number:
            raise ValueError(
                f"vocabulary: expected each word of {path} once, but lines {first} and {number} have "
                f"{word.decode(errors='replace')!r}."
            )
    return words


@functools.lru_cache(maxsize=256)
def _index(vocabulary: Vocabulary, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The hashes of all words sorted by FarmHash, and the words' indices."""
    assert vocabulary.words is not None
    words = [w if isinstance(w, bytes) else w.to_bytes(8, "little", signed=True) for w in vocabulary.words]
    lengths = torch.tensor([0, *map(len, words)])
    with torch.inference_mode(False):
        text = torch.frombuffer(bytearray(b"".join(words) or b" "), dtype=torch.uint8)[: sum(map(len, words))]
        items = Ragged(text, lengths.cumsum(0)).to(device)
        farm, index = torch.sort(ids.farm(items))
        if bool((farm.diff() == 0).any()):
            raise ValueError("vocabulary has two words with the same FarmHash, so it cannot tell them apart.")
        return farm, ids.murmur(items)[index], index
