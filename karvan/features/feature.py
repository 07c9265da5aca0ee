"""`Feature`: a column's name and the chain of transforms that turns it into a feature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike

from karvan.features.ops.base import ChainStep, Number
from karvan.features.ops.bucketize import Bucketize, ToIds
from karvan.features.ops.cross import Concat, Cross
from karvan.features.ops.decimals import ParseIds, ParseNumbers, ToText
from karvan.features.ops.hashing import Hash
from karvan.features.ops.ids import DropSign, HashStack, Mod, MultiHash, Prefix
from karvan.features.ops.numbers import Clip, FillMissing, Log, Log1p, Normalise, Round
from karvan.features.ops.ragged_shapes import FillEmpty, FillLists, Flatten, ToDense, ToRagged
from karvan.features.ops.strings import Lower, Split, Strip, Substring, Upper
from karvan.features.ops.truncate import Truncate
from karvan.features.ops.vocabulary import Vocabulary, words_from_file
from karvan.ids import check_hash


@dataclass(frozen=True)
class Feature:
    """A named chain of transforms, e.g. `Feature("price").log1p().clip(0, 10)`.

    A chain starts from the batch's entry of its own name, unless `select`, `cross` or `concat` name others;
    such a name means the result of the feature of that name if there is one, else the batch's entry. Each
    method returns a new feature. A chain that ends with several values gives `name_0`, `name_1`, ….

    missing: what happens if a batch lacks a column: "error", or "empty", which computes the feature as if
    no sample had a value: lists are empty, and `fill_missing` fills all samples.
    """

    name: str
    columns: tuple[str, ...] = field(default=(), kw_only=True)
    raw: bool = field(default=False, kw_only=True)
    missing: str = field(default="error", kw_only=True)
    ops: tuple[ChainStep, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Feature expects a name, but received {self.name!r}.")
        if self.missing not in ("error", "empty"):
            raise ValueError(
                f"Feature '{self.name}' expects missing 'error' or 'empty', but received {self.missing!r}."
            )

    def select(self, *columns: str, raw: bool = False, missing: str | None = None) -> Feature:
        """Start from other columns or features; with `raw`, from the batch even if a feature has the name.

        missing: "error" or "empty", what happens if a batch lacks a column; see `Feature`.
        """
        if self.ops or self.columns:
            raise ValueError(
                f"Feature '{self.name}' names its columns {list(columns)} after its first step; "
                "a chain's columns are named in its first step."
            )
        if not columns or not all(isinstance(column, str) and column for column in columns):
            raise ValueError(f"Feature '{self.name}', select: expected names, but received {list(columns)}.")
        return replace(self, columns=columns, raw=raw, missing=missing or self.missing)

    def then(self, op: ChainStep) -> Feature:
        """Add a step; the methods below do this for the steps of this package."""
        if op.joins and self.width() < 2:
            raise ValueError(
                f"Feature '{self.name}', {op.name}: expected two columns or more, but there is "
                f"only '{self.columns[0] if self.columns else self.name}'."
            )
        return replace(self, ops=(*self.ops, op))

    def width(self) -> int:
        """How many values the chain has at its end."""
        width = len(self.columns) or 1
        for op in self.ops:
            width = (1 if op.joins else width) * len(op.parts())
        return width

    def outputs(self) -> tuple[str, ...]:
        """The names of its results: its own, or numbered ones if there are several."""
        width = self.width()
        return (self.name,) if width == 1 else tuple(f"{self.name}_{i}" for i in range(width))

    # Ids

    def hash(self, kind: str, bucket: int | None = None) -> Feature:
        """Hash strings or ids by "farm" or "murmur": to 64 bits, or below `bucket`.

        "farm63" and "murmur63" drop the sign bit, and so does a bucket of 0; both are as in RecIS.
        """
        try:
            check_hash(kind, bucket)
        except ValueError as error:
            raise ValueError(f"Feature '{self.name}', {error}") from None
        hashed = self.then(Hash(kind.removesuffix("63")))
        if bucket:
            return hashed.then(Mod(bucket))
        return hashed.then(DropSign()) if bucket == 0 or kind.endswith("63") else hashed

    def mod(self, modulus: int) -> Feature:
        """The remainder of ids read as unsigned."""
        return self.then(Mod(modulus))

    def multi_hash(self, buckets: Sequence[int]) -> Feature:
        """Up to four small ids for each id, as features `name_0`, `name_1`, …."""
        return self.then(MultiHash(tuple(buckets)))

    def prefix(self, group: int, bits: int) -> Feature:
        """Ids with the group in their upper bits, so that those of different groups differ."""
        return self.then(Prefix(group, bits))

    def hash_stack(self, rounds: int, size: int) -> Feature:
        """Each id as `rounds` ids of a table of rounds * size rows, all in the id's row."""
        return self.then(HashStack(rounds, size))

    def vocabulary(
        self,
        words: Sequence[str] | Sequence[bytes] | Sequence[int] | None = None,
        oov: int = 1,
        *,
        file: str | PathLike[str] | None = None,
        max_words: int | None = None,
        min_count: int = 1,
    ) -> Feature:
        """The index of a string or id in the list; unknown ones are in `oov` buckets after it.

        oov: 0 gives unknown ones -1.

        file: a text file with the words, strings, one on each line; it is read at once.

        Without words, the engine's `fit` finds those that occur at least `min_count` times, at most
        `max_words` of them; the most frequent are first.
        """
        if file is not None:
            if words is not None:
                raise ValueError(
                    f"Feature '{self.name}', vocabulary: expected words or a file, but received both."
                )
            try:
                words = words_from_file(file)
            except ValueError as error:
                raise ValueError(f"Feature '{self.name}', {error}") from None
        if words is None:
            return self.then(Vocabulary(None, oov, max_words, min_count))
        if max_words is not None or min_count != 1:
            raise ValueError(
                f"Feature '{self.name}', vocabulary: expected words, or max_words and min_count to find "
                "them, but received both."
            )
        if isinstance(words, str | bytes):
            raise TypeError(
                f"Feature '{self.name}', vocabulary: expected a list of words, but received {words!r}; "
                "file=… reads words from a file."
            )
        kinds = {int if type(word) is int else bytes for word in words}
        if len(kinds) > 1 or not all(isinstance(word, str | bytes) or type(word) is int for word in words):
            raise TypeError(
                f"Feature '{self.name}', vocabulary: expected all words to be strings, or all ids."
            )
        return self.then(Vocabulary(tuple(w.encode() if isinstance(w, str) else w for w in words), oov))  # type: ignore[arg-type]

    def cross(self, *columns: str) -> Feature:
        """All combinations of the ids of two columns or more, hashed; without names, of those selected."""
        return (self.select(*columns) if columns else self).then(Cross())

    def concat(self, *columns: str, offsets: Sequence[int] | None = None) -> Feature:
        """The columns' values one after the other in each row, ids shifted by an offset for each column."""
        chain = self.select(*columns) if columns else self
        return chain.then(Concat(None if offsets is None else tuple(offsets)))

    # Numbers

    def bucketize(self, boundaries: Sequence[float]) -> Feature:
        """How many boundaries are not above the value; NaN becomes no id."""
        return self.then(Bucketize(tuple(boundaries), self._has_no_nan()))

    def log1p(self) -> Feature:
        """log(1 + x)."""
        if self.ops and isinstance(self.ops[-1], Clip):  # both in one pass
            return replace(self, ops=(*self.ops[:-1], Log1p(self.ops[-1])))
        return self.then(Log1p())

    def log(self, base: float = math.e) -> Feature:
        """The logarithm to a base."""
        return self.then(Log(base))

    def clip(self, low: Number | None = None, high: Number | None = None) -> Feature:
        """Numbers moved to the nearest within the limits."""
        return self.then(Clip(low, high))

    def normalise(self, mean: float | None = None, std: float | None = None) -> Feature:
        """(x - mean) / std; without numbers, the engine's `fit` computes them."""
        return self.then(Normalise(mean, std))

    def fill_missing(self, value: Number, missing: Number | None = None) -> Feature:
        """A value for samples that have none, and instead of NaN or of the number `missing`."""
        return self.then(FillMissing(value, missing))

    def round(self, digits: int = 0) -> Feature:
        """Floats rounded, half to even."""
        return self.then(Round(digits))

    def to_ids(self, buckets: int | None = None, default: int | None = None) -> Feature:
        """Decimal strings as the 64-bit integers that they spell, an empty string as no id.

        Numbers, with `buckets`: rounded to ids below it; those outside of this range become `default`, or 0
        without one. NaN becomes the default if there is one, else no id.
        """
        if buckets is not None:
            return self.then(ToIds(buckets, default, self._has_no_nan()))
        if default is not None:
            raise ValueError(
                f"Feature '{self.name}', to_ids: expected buckets together with a default, but received none."
            )
        return self.then(ParseIds())

    def _has_no_nan(self) -> bool:
        """Whether the last step leaves no NaN, so that the next one need not look for it."""
        last = self.ops[-1] if self.ops else None
        return isinstance(last, FillMissing) and last.missing is None and not math.isnan(last.value)

    # Rows

    def truncate(
        self, length: int, side: str = "left", level: str = "outer", *, check: bool = False
    ) -> Feature:
        """Rows cut to a length.

        side: "left" cuts the left and keeps the last values, "right" keeps the first, "top" those of the
        largest weights, in their order.
        level: of lists of lists, "outer" cuts the lists of a row, "inner" the values of a list.
        check: cut nothing; a longer row is an error.
        """
        return self.then(Truncate(length, side, level, check))

    def to_ragged(self, pad: Number | None = None, *, trailing: bool = False) -> Feature:
        """A tensor's columns as ragged rows, without those that equal `pad`; trailing: only at the end."""
        return self.then(ToRagged(pad, trailing))

    def to_dense(self, length: int | Sequence[int], fill: Number = 0, side: str = "right") -> Feature:
        """Ragged rows cut, or filled up on the right, to one length; side "left" keeps the last values.

        Lists of lists have two lengths: `to_dense([10, 3])` gives 10 lists of 3 values in each row.
        """
        return self.then(ToDense(length if isinstance(length, int) else tuple(length), fill, side))  # type: ignore[arg-type]

    def flatten(self) -> Feature:
        """Lists of lists as one list a row."""
        return self.then(Flatten())

    def fill_lists(self, length: int) -> Feature:
        """Rows of lists of lists filled up with empty lists, to `length` lists; a longer row is an error."""
        return self.then(FillLists(length))

    def fill_empty(self, value: Number) -> Feature:
        """One value in each row that has none."""
        return self.then(FillEmpty(value))

    # Strings

    def lower(self) -> Feature:
        """Capitals of ASCII become small letters."""
        return self.then(Lower())

    def upper(self) -> Feature:
        """Small letters of ASCII become capitals."""
        return self.then(Upper())

    def strip(self) -> Feature:
        """Strings without the spaces at their ends."""
        return self.then(Strip())

    def substring(self, start: int, length: int | None = None) -> Feature:
        """Bytes from `start` (negative: from the end) on, at most `length` of them."""
        return self.then(Substring(start, length))

    def split(self, separator: str | bytes = ",", *, skip_empty: bool = False) -> Feature:
        """A string's parts between separators, as a list of strings; skip_empty: without empty ones."""
        separator = separator.encode() if isinstance(separator, str) else separator
        return self.then(Split(separator, skip_empty))

    def to_text(self, *, unsigned: bool = False) -> Feature:
        """Integers as strings of their decimal digits: a hash of them is that of TensorFlow's columns.

        A batch has unsigned 64-bit ids as int64, from 2**63 on as negative numbers; `unsigned` gives their
        own text.
        """
        return self.then(ToText(unsigned))

    def to_numbers(self, default: float = math.nan) -> Feature:
        """Strings such as "2.5" as the float32 that they spell; empty and missing ones as the default."""
        return self.then(ParseNumbers(float(default)))
