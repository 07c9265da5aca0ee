"""`IndexLookup`: strings or integers as their index in a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from karvan.compat.elasticdl_preprocessing.layers.base import COLUMN, FeatureLayer
from karvan.features import Feature
from karvan.features.ops.vocabulary import words_from_file


class IndexLookup(FeatureLayer):
    """The index of a word; others are hashed into num_oov_tokens ids after the last, or are -1 if that is 0.

    vocabulary: a list of words, or the path of a text file with one on each line.
    """

    def __init__(
        self,
        vocabulary: Sequence[str] | Sequence[int] | str | None = None,
        num_oov_tokens: int = 1,
        name: str | None = None,
    ) -> None:
        if vocabulary is None:
            raise ValueError("IndexLookup expects a vocabulary, a list of words or a file, got none.")
        words: Sequence[str | bytes] = (
            words_from_file(vocabulary) if isinstance(vocabulary, str) else [str(word) for word in vocabulary]
        )
        super().__init__(Feature(COLUMN).to_text().vocabulary(words, num_oov_tokens), name)  # type: ignore[arg-type]
        self.num_oov_tokens = num_oov_tokens
        self._words = len(words)

    def vocab_size(self) -> int:
        """How many ids there are."""
        return self._words + self.num_oov_tokens
