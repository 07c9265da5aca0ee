"""`Feature`: a column's name and the chain of transforms that turns it into a feature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike

from karvan.features.ops.base import ChainStep, Number
from karvan.features.ops.cross import Concat, Cross
from karvan.features.ops.decimals import ParseIds, ParseNumbers, ToText
from karvan.features.ops.fitted import Vocabulary, words_from_file
from karvan.features.ops.ids import DropSign, Hash, HashStack, Mod, MultiHash, Prefix
from karvan.features.ops.numbers import Bucketize, Clip, FillMissing, Log, Log1p, Normalise, Round, ToIds
from karvan.features.ops.ragged_shapes import FillEmpty, FillLists, Flatten, ToDense, ToRagged
from karvan.features.ops.strings import Lower, Split, Strip, Substring, Truncate, Upper
from karvan.ids import check_hash


@dataclass(frozen=True)
class Feature:
    """A named chain of transforms.

    Each method adds a step and returns a new feature.

    A chain starts from the batch's column of its own name, unless `select`, `cross` or `concat` name others.
    Such a name means the result of the feature of that name if there is one, else the batch's column. A chain
    that ends with several values gives `name_0`, `name_1`, ….

    Args:
        name: The name of the result.
        columns: What the chain starts from; `select` sets it.
        raw: Whether it starts from columns of the batch only; `select` sets it.
        missing: What happens if a batch lacks a column: "error", or "empty", as if no sample had a value.
            Lists are then empty, and `fill_missing` fills all samples.
        ops: The steps; the methods add them.

    Raises:
        ValueError: The name is empty, or `missing` is unknown.

    Example:
        >>> features = kv.FeatureEngine(
        ...     [
        ...         kv.Feature("price").log1p().clip(0, 10),
        ...         kv.Feature("pair").cross("user", "item"),
        ...     ]
        ... )
        >>> batch = {
        ...     "price": torch.tensor([0.0, 1.0]),
        ...     "user": torch.tensor([1, 2]),
        ...     "item": torch.tensor([5, 6]),
        ... }
        >>> features(batch)["price"]
        tensor([0.0000, 0.6931])
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
        """Start from other columns or features.

        Args:
            *columns: Their names.
            raw: Whether names mean columns of the batch, also if a feature has the name.
            missing: "error" or "empty": what happens if a batch lacks a column.

        Returns:
            The new feature.

        Raises:
            ValueError: The chain has steps already, or there are no names.
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
        """Add a step of your own.

        Args:
            op: The step.

        Returns:
            The new feature.

        Raises:
            ValueError: The step needs two columns or more.
        """
        if op.joins and self.width() < 2:
            raise ValueError(
                f"Feature '{self.name}', {op.name}: expected two columns or more, but there is "
                f"only '{self.columns[0] if self.columns else self.name}'."
            )
        return replace(self, ops=(*self.ops, op))

    def width(self) -> int:
        """Count the values that the chain has at its end.

        Returns:
            How many.
        """
        width = len(self.columns) or 1
        for op in self.ops:
            width = (1 if op.joins else width) * len(op.parts())
        return width

    def outputs(self) -> tuple[str, ...]:
        """Return the names of its results: its own, or numbered ones if there are several.

        Returns:
            The names.
        """
        width = self.width()
        return (self.name,) if width == 1 else tuple(f"{self.name}_{i}" for i in range(width))

    # Ids

    def hash(self, kind: str, bucket: int | None = None) -> Feature:
        """Hash strings or ids.

        Args:
            kind: "farm" or "murmur"; "farm63" and "murmur63" drop the sign bit, as RecIS does.
            bucket: Results are below this; by default they have 64 bits. 0 drops the sign bit only.

        Returns:
            The new feature.

        Raises:
            ValueError: The kind is unknown.

        Example:
            >>> city = kv.Feature("city").hash("farm", bucket=1000)
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
        """Take the remainder of ids, which are read as unsigned.

        Args:
            modulus: What ids are divided by.

        Returns:
            The new feature.
        """
        return self.then(Mod(modulus))

    def multi_hash(self, buckets: Sequence[int]) -> Feature:
        """Make up to four small ids of each id, as features `name_0`, `name_1`, ….

        Args:
            buckets: The range of each of them.

        Returns:
            The new feature.
        """
        return self.then(MultiHash(tuple(buckets)))

    def prefix(self, group: int, bits: int) -> Feature:
        """Put a group into the upper bits of ids, so that those of different groups differ.

        Args:
            group: The number of the group.
            bits: How many bits it takes.

        Returns:
            The new feature.
        """
        return self.then(Prefix(group, bits))

    def hash_stack(self, rounds: int, size: int) -> Feature:
        """Make `rounds` ids of each id, for a table of rounds * size rows.

        All are in the id's row.

        Args:
            rounds: How many ids.
            size: How many rows there are for each round.

        Returns:
            The new feature.
        """
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
        """Replace a string or id by its index in a list of words.

        Without words, the engine's `fit` finds them in data, the most frequent first.

        Args:
            words: The words, strings or ids.
            oov: How many buckets behind the list take unknown words; with 0 they become -1.
            file: A text file with the words, one on each line.
            max_words: How many words `fit` keeps.
            min_count: How often a word must occur for `fit` to keep it.

        Returns:
            The new feature.

        Raises:
            ValueError: Words come with a file, or with settings of `fit`.
            TypeError: The words are one string, or strings and ids.

        Example:
            >>> engine = kv.FeatureEngine([kv.Feature("day").vocabulary([5, 7])])
            >>> engine({"day": torch.tensor([7, 5, 6])})["day"]
            tensor([1, 0, 2])
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
        """Combine the ids of two columns or more, and hash every combination.

        Args:
            *columns: Their names; by default those selected.

        Returns:
            The new feature.
        """
        return (self.select(*columns) if columns else self).then(Cross())

    def concat(self, *columns: str, offsets: Sequence[int] | None = None) -> Feature:
        """Put the columns' values one after the other in each row.

        Args:
            *columns: Their names; by default those selected.
            offsets: What is added to the ids of each column.

        Returns:
            The new feature.
        """
        chain = self.select(*columns) if columns else self
        return chain.then(Concat(None if offsets is None else tuple(offsets)))

    # Numbers

    def bucketize(self, boundaries: Sequence[float]) -> Feature:
        """Count the boundaries that are not above the value.

        NaN becomes no id.

        Args:
            boundaries: The boundaries, ascending.

        Returns:
            The new feature.

        Example:
            >>> age = kv.FeatureEngine([kv.Feature("age").bucketize([18, 65])])
            >>> age({"age": torch.tensor([10.0, 18.0, 70.0])})["age"]
            tensor([0, 1, 2])
        """
        return self.then(Bucketize(tuple(boundaries), self._has_no_nan()))

    def log1p(self) -> Feature:
        """Compute log(1 + x).

        Returns:
            The new feature.
        """
        if self.ops and isinstance(self.ops[-1], Clip):  # both in one pass
            return replace(self, ops=(*self.ops[:-1], Log1p(self.ops[-1])))
        return self.then(Log1p())

    def log(self, base: float = math.e) -> Feature:
        """Compute the logarithm.

        Args:
            base: Its base.

        Returns:
            The new feature.
        """
        return self.then(Log(base))

    def clip(self, low: Number | None = None, high: Number | None = None) -> Feature:
        """Move numbers to the nearest within limits.

        Args:
            low: The lowest; None for no limit.
            high: The highest; None for no limit.

        Returns:
            The new feature.
        """
        return self.then(Clip(low, high))

    def normalise(self, mean: float | None = None, std: float | None = None) -> Feature:
        """Compute (x - mean) / std.

        Without numbers, the engine's `fit` computes them from data.

        Args:
            mean: The mean.
            std: The standard deviation.

        Returns:
            The new feature.
        """
        return self.then(Normalise(mean, std))

    def fill_missing(self, value: Number, missing: Number | None = None) -> Feature:
        """Fill in a value where a sample has none.

        Args:
            value: What they get, and what replaces NaN.
            missing: A number that stands for no value, too.

        Returns:
            The new feature.
        """
        return self.then(FillMissing(value, missing))

    def round(self, digits: int = 0) -> Feature:
        """Round floats, half to even.

        Args:
            digits: How many decimal digits are kept.

        Returns:
            The new feature.
        """
        return self.then(Round(digits))

    def to_ids(self, buckets: int | None = None, default: int | None = None) -> Feature:
        """Turn decimal strings, or numbers, into ids.

        Strings become the 64-bit integers that they spell; an empty string becomes no id. Numbers need
        `buckets`: they are rounded.

        Args:
            buckets: Ids of numbers are below this.
            default: The id of numbers outside of this range, and of NaN. Without it, they become 0, and NaN
                no id.

        Returns:
            The new feature.

        Raises:
            ValueError: There is a default without buckets.
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
        """Cut rows to a length.

        Args:
            length: How many values are kept at most.
            side: What is cut: "left" keeps the last values, "right" keeps the first; "top" keeps those of the
                largest weights, in their order.
            level: What is cut in lists of lists: "outer", the lists of a row; "inner", the values of a list.
            check: Cut nothing; a longer row is an error.

        Returns:
            The new feature.
        """
        return self.then(Truncate(length, side, level, check))

    def to_ragged(self, pad: Number | None = None, *, trailing: bool = False) -> Feature:
        """Turn the rows of a matrix into lists, without padding.

        Args:
            pad: The number that fills up rows.
            trailing: Whether it is removed only at the end of a row.

        Returns:
            The new feature.
        """
        return self.then(ToRagged(pad, trailing))

    def to_dense(self, length: int | Sequence[int], fill: Number = 0, side: str = "right") -> Feature:
        """Cut or fill up lists to one length.

        Args:
            length: The length. Lists of lists have two: `[10, 3]` gives 10 lists of 3 values in each row.
            fill: What fills up rows on the right.
            side: What is cut: "right" keeps the first values, "left" the last.

        Returns:
            The new feature.
        """
        return self.then(ToDense(length if isinstance(length, int) else tuple(length), fill, side))  # type: ignore[arg-type]

    def flatten(self) -> Feature:
        """Turn lists of lists into one list a row.

        Returns:
            The new feature.
        """
        return self.then(Flatten())

    def fill_lists(self, length: int) -> Feature:
        """Fill up rows of lists of lists with empty lists.

        A longer row is an error.

        Args:
            length: How many lists each row gets.

        Returns:
            The new feature.
        """
        return self.then(FillLists(length))

    def fill_empty(self, value: Number) -> Feature:
        """Put one value into each row that has none.

        Args:
            value: The value.

        Returns:
            The new feature.
        """
        return self.then(FillEmpty(value))

    # Strings

    def lower(self) -> Feature:
        """Turn capitals of ASCII into small letters.

        Returns:
            The new feature.
        """
        return self.then(Lower())

    def upper(self) -> Feature:
        """Turn small letters of ASCII into capitals.

        Returns:
            The new feature.
        """
        return self.then(Upper())

    def strip(self) -> Feature:
        """Remove the spaces at both ends of strings.

        Returns:
            The new feature.
        """
        return self.then(Strip())

    def substring(self, start: int, length: int | None = None) -> Feature:
        """Take a part of strings, counted in bytes.

        Args:
            start: The first byte; negative numbers count from the end.
            length: How many at most; by default all.

        Returns:
            The new feature.
        """
        return self.then(Substring(start, length))

    def split(self, separator: str | bytes = ",", *, skip_empty: bool = False) -> Feature:
        """Split strings into lists of strings.

        Args:
            separator: What is between the parts.
            skip_empty: Whether to leave out empty parts.

        Returns:
            The new feature.
        """
        separator = separator.encode() if isinstance(separator, str) else separator
        return self.then(Split(separator, skip_empty))

    def to_text(self, *, unsigned: bool = False) -> Feature:
        """Turn integers into strings of their decimal digits.

        A hash of them is that of TensorFlow's columns.

        Args:
            unsigned: Whether ids from 2**63 on, which a batch has as negative numbers, give their unsigned
                text.

        Returns:
            The new feature.
        """
        return self.then(ToText(unsigned))

    def to_numbers(self, default: float = math.nan) -> Feature:
        """Turn strings such as "2.5" into float32 numbers.

        Args:
            default: What empty and missing strings become.

        Returns:
            The new feature.
        """
        return self.then(ParseNumbers(float(default)))
