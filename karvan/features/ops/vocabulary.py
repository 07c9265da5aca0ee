"""Vocabulary lookup: the index of a string or id in a list, and buckets for unknown ones."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from karvan import ids
from karvan.features.ops.hashing import StringOp
from karvan.features.ops.layout import describe, is_text
from karvan.features.running_moments import FittedOp, RunningStatistics, WordCounts
from karvan.ragged import Entry, Ragged


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
