"""Vocabulary lookup: the place of a string or id in a list, and buckets for those that are not in it."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from karvan import ids
from karvan.features.hashing import StringOp
from karvan.features.layout import describe, is_text
from karvan.ragged import Entry, Ragged


@dataclass(frozen=True)
class Vocabulary(StringOp):
    """Known strings (or ids) by their place in the list; others in `oov` buckets behind it.

    Strings are found by their FarmHash and confirmed by their MurmurHash: 128 bits, without comparing text.
    """

    words: tuple[bytes, ...] | tuple[int, ...]
    oov: int
    name: ClassVar[str] = "vocabulary"

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError("vocabulary expects at least one word, but received none.")
        if self.oov < 1:
            raise ValueError(
                f"vocabulary expects at least 1 bucket for words it does not know, but received {self.oov}."
            )
        if len(set(self.words)) != len(self.words):
            twice = next(word for word, times in Counter(self.words).items() if times > 1)
            raise ValueError(f"vocabulary expects each word once, but received {twice!r} twice.")
        # Hashing the whole list for every lookup among other ops would cost more than the lookup.
        object.__setattr__(self, "_hash", hash((self.words, self.oov)))

    def __hash__(self) -> int:
        return int(self.__dict__["_hash"])

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[object, int]]:
        # The hash of a string differs from process to process, so it must not travel.
        return (Vocabulary, (self.words, self.oov))

    def check(self, *entries: Entry) -> None:
        """Strings for words, ids for ids."""
        super().check(*entries)
        if is_text(entries[0]) != isinstance(self.words[0], bytes):
            expected = "strings, as its words are," if isinstance(self.words[0], bytes) else "ids, as its own"
            raise TypeError(f"expected {expected} but received {describe(entries[0])}.")

    def compute(self, items: Ragged) -> Tensor:
        """Places of the known, buckets of the others by their FarmHash."""
        farm, murmur, place = _index(self, items.values.device)
        hashed = ids.farm(items)
        at = torch.searchsorted(farm, hashed).clamp_(max=farm.shape[0] - 1)
        known = (farm[at] == hashed) & (murmur[at] == ids.murmur(items))
        return torch.where(known, place[at], ids.mod(hashed, self.oov) + len(self.words))


@functools.lru_cache(maxsize=256)
def _index(vocabulary: Vocabulary, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The hashes of all words by their FarmHash, and the words' places."""
    words = [w if isinstance(w, bytes) else w.to_bytes(8, "little", signed=True) for w in vocabulary.words]
    with torch.inference_mode(False):
        farm, place = torch.sort(ids.farm(words))
        if bool((farm.diff() == 0).any()):
            raise ValueError("vocabulary holds two words of the same FarmHash, which cannot be told apart.")
        return farm.to(device), ids.murmur(words)[place].to(device), place.to(device)
