"""Transforms of strings, which are rows of bytes. Letters and spaces are those of ASCII."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from karvan.batch_slicing import as_offsets, offsets_from
from karvan.features.ops.base import ElementOp, RowOp, expect_text
from karvan.features.ops.layout import describe, is_text, keep, row_numbers
from karvan.ragged import Entry, NestedRagged, Ragged


@dataclass(frozen=True)
class Lower(ElementOp):
    """A to Z become a to z."""

    name: ClassVar[str] = "lower"
    takes_text: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Strings."""
        expect_text(*entries)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """Lower letters are 32 above capitals; bytes of longer UTF-8 characters are 128 and above."""
        return torch.where((values >= 65) & (values <= 90), values + 32, values)


@dataclass(frozen=True)
class Upper(ElementOp):
    """a to z become A to Z."""

    name: ClassVar[str] = "upper"
    takes_text: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Strings."""
        expect_text(*entries)

    @override
    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        return torch.where((values >= 97) & (values <= 122), values - 32, values)


class TextOp(RowOp):
    """A step on each string separately, in rows of one string or of lists of strings."""

    takes_text: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Strings."""
        expect_text(*entries)

    def run_rows(self, *entries: Entry) -> Entry:
        """Lists of strings keep their lists."""
        (entry,) = entries
        if isinstance(entry, NestedRagged):
            return NestedRagged(*_parts(self.run_strings(entry.lists())), entry.outer)
        assert isinstance(entry, Ragged)
        return self.run_strings(entry)

    @abstractmethod
    def run_strings(self, strings: Ragged) -> Ragged:
        """New strings."""


def _parts(strings: Ragged) -> tuple[Tensor, Tensor]:
    return strings.values, as_offsets(strings)


@dataclass(frozen=True)
class Strip(TextOp):
    """Strings without the spaces at both ends: blank, tab, line feed, vertical tab, form feed, return."""

    name: ClassVar[str] = "strip"

    def run_strings(self, strings: Ragged) -> Ragged:
        """A byte stays if the string has a byte that is no space up to here, and one from here on."""
        values, offsets = _parts(strings)
        space = (values == 32) | ((values >= 9) & (values <= 13))
        solid = offsets_from((~space).to(torch.int64))
        row = row_numbers(offsets.diff(), values.shape[0])
        up_to_here = solid[1:] > solid[offsets[row]]
        from_here = solid[offsets[row + 1]] > solid[:-1]
        return keep(strings, up_to_here & from_here)


@dataclass(frozen=True)
class Substring(TextOp):
    """The bytes from `start` on, at most `length` of them; a negative start counts from the end."""

    start: int
    length: int | None
    name: ClassVar[str] = "substring"

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"substring expects a length of at least 0, but received {self.length}.")

    def run_strings(self, strings: Ragged) -> Ragged:
        """As a slice of Python's bytes."""
        values, offsets = _parts(strings)
        lengths = offsets.diff()
        row = row_numbers(lengths, values.shape[0])
        position = torch.arange(values.shape[0], device=row.device) - offsets[row]
        first = lengths.add(self.start).clamp(min=0)[row] if self.start < 0 else self.start
        mask = position >= first
        if self.length is not None:
            mask &= position < first + self.length
        return keep(strings, mask)


@dataclass(frozen=True)
class Split(RowOp):
    """A string's parts between separators, as a list of strings; an empty string has no parts.

    Empty parts, as between two separators in a row, are strings too, unless they are skipped.
    """

    separator: bytes
    skip_empty: bool = False
    name: ClassVar[str] = "split"
    takes_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.separator) != 1:
            raise ValueError(f"split expects a separator of one byte, but received {self.separator!r}.")

    def check(self, *entries: Entry) -> None:
        """One string a row."""
        expect_text(*entries)
        if not (is_text(entries[0]) and isinstance(entries[0], Ragged)):
            raise TypeError(f"expected one string a row, but received {describe(entries[0])}.")

    def run_rows(self, *entries: Entry) -> Entry:
        """Counts the bytes between separators."""
        (entry,) = entries
        assert isinstance(entry, Ragged)
        values, offsets = _parts(entry)
        lengths = offsets.diff()
        cuts = values == self.separator[0]
        before = offsets_from(cuts.to(torch.int64))
        parts = before[offsets].diff() + (lengths > 0)
        outer = offsets_from(parts)
        row = row_numbers(lengths, values.shape[0])
        part = outer[row] + before[:-1] - before[offsets[row]]
        sizes = torch.bincount(part[~cuts], minlength=int(outer[-1]))
        if self.skip_empty:
            solid = sizes > 0
            outer = offsets_from(solid.to(torch.int64))[outer]
            sizes = sizes[solid]
        return NestedRagged(values[~cuts], offsets_from(sizes), outer)
