"""Transforms of rows: to and from tensors, without nesting, without empty rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from karvan import kernels
from karvan.features.ops.base import (
    Number,
    RowOp,
    as_ragged,
    check_rows,
    describe,
    describe_for_lists,
    is_text,
    keep,
    row_numbers,
    row_positions,
    sole,
)
from karvan.ragged import Entry, NestedRagged, Ragged, as_offsets, offsets_from, values_of


@dataclass(frozen=True)
class ToRagged(RowOp):
    """The columns of a tensor as rows of a Ragged, without those that equal `pad`, if there is one.

    Trailing: only pads at the end of a row are dropped, and those before another value stay.
    """

    pad: Number | None
    trailing: bool = False
    name: ClassVar[str] = "to_ragged"
    sized_by_shapes: ClassVar[bool] = True  # unless there is a pad

    def __post_init__(self) -> None:
        if self.trailing and self.pad is None:
            raise ValueError("to_ragged expects a pad together with trailing=True, but received none.")

    def check(self, *entries: Entry) -> None:
        """Not lists of lists, nor vectors if there is a `pad`."""
        (entry,) = entries
        if isinstance(entry, NestedRagged):
            raise TypeError(
                f"expected a Tensor or a Ragged, but received {describe(entry)}: flatten it first."
            )
        check_rows(entry)
        if isinstance(entry, Tensor) and entry.dim() > 3:
            raise ValueError(f"expected a Tensor of at most 3 dimensions, but received {describe(entry)}.")
        if self.pad is not None and values_of(as_ragged(entry)).dim() > 1:
            raise ValueError(f"expected plain values to compare with pad, but received {describe(entry)}.")

    def run_rows(self, *entries: Entry) -> Entry:
        """Keeps the order."""
        (entry,) = entries
        assert not isinstance(entry, NestedRagged)
        ragged = as_ragged(entry)
        if self.pad is None:
            return ragged
        if isinstance(self.pad, float) and math.isnan(self.pad):
            solid = ~ragged.values.isnan()
        else:
            solid = ragged.values != self.pad
        return keep(ragged, _up_to_the_last(ragged, solid) if self.trailing else solid)


def _up_to_the_last(ragged: Ragged, solid: Tensor) -> Tensor:
    """The values from which on their row has a solid one."""
    before, offsets = offsets_from(solid.to(torch.int64)), as_offsets(ragged)
    row = row_numbers(offsets.diff(), solid.shape[0])
    return before[offsets[row + 1]] > before[:-1]


@dataclass(frozen=True)
class ToDense(RowOp):
    """Rows cut, or filled up on the right, to one length: a tensor of rows and columns.

    Side "right" cuts on the right and keeps the first values, "left" the last. Lists of lists have two
    lengths, of the lists in a row and of the values in a list.
    """

    length: int | tuple[int, int]
    fill: Number
    side: str = "right"
    name: ClassVar[str] = "to_dense"

    def __post_init__(self) -> None:
        lengths = self.length if isinstance(self.length, tuple) else (self.length,)
        if min(lengths, default=0) < 1:
            raise ValueError(f"to_dense expects a length of at least 1, but received {self.length}.")
        if isinstance(self.length, tuple) and len(self.length) != 2:
            raise ValueError(
                "to_dense expects a length, or two of them for lists of lists, but received "
                f"{len(self.length)}."
            )
        if self.side not in ("left", "right"):
            raise ValueError(f"to_dense expects the side 'left' or 'right', but received '{self.side}'.")

    def check(self, *entries: Entry) -> None:
        """Lists without weights, which a tensor cannot have; two lengths for lists of lists."""
        (entry,) = entries
        if isinstance(entry, NestedRagged) and not isinstance(self.length, tuple):
            raise TypeError(
                f"expected a Ragged, but received {describe(entry)}: lists of lists have two lengths, "
                "as in to_dense([10, 3]), and flatten() before this step makes one list of them."
            )
        if isinstance(self.length, tuple) and not isinstance(entry, NestedRagged):
            raise TypeError(
                f"expected lists of lists (a NestedRagged) for the lengths {list(self.length)}, but received "
                f"{describe(entry)}."
            )
        if isinstance(entry, Tensor):
            raise TypeError(f"expected a Ragged, but received {describe_for_lists(entry)}.")
        if isinstance(entry, Ragged) and entry.weights is not None:
            raise ValueError("expected a Ragged without weights, because a Tensor cannot carry them.")
        _expect_fitting(self.fill, entry)
        check_rows(entry)

    def run_rows(self, *entries: Entry) -> Entry:
        """Scatters the values into a filled tensor."""
        (entry,) = entries
        if isinstance(entry, NestedRagged):
            assert isinstance(self.length, tuple)
            lists = self._dense(entry.lists(), self.length[1])
            return self._dense(Ragged(lists, entry.outer), self.length[0])
        assert isinstance(self.length, int)
        return self._dense(sole(Ragged, entries), self.length)

    def _dense(self, entry: Ragged, length: int) -> Tensor:
        offsets, total = as_offsets(entry), entry.values.shape[0]
        if kernels.may_copy(entry.values):  # which does not wait for the GPU, as the masks below do
            from karvan.kernels.rows import dense_rows

            return dense_rows(entry.values, offsets, length, self.fill, self.side == "left")
        row, column = row_positions(offsets, total)
        if self.side == "left":
            column = column - (offsets.diff() - length).clamp(min=0)[row]
        fits = (column >= 0) & (column < length)
        result = entry.values.new_full((entry.rows, length, *entry.values.shape[1:]), self.fill)
        return result.index_put((row[fits], column[fits]), entry.values[fits])


def _expect_lists(entry: Entry) -> None:
    if not isinstance(entry, NestedRagged):
        raise TypeError(f"expected lists of lists (a NestedRagged), but received {describe(entry)}.")
    check_rows(entry)


def _expect_fitting(value: Number, entry: Ragged | NestedRagged) -> None:
    if isinstance(value, float) and not entry.values.is_floating_point():
        raise TypeError(f"expected an integer to fill {describe(entry)} with, but received {value}.")


@dataclass(frozen=True)
class Flatten(RowOp):
    """Lists of lists as one list a row; a row's strings become one string."""

    name: ClassVar[str] = "flatten"
    sized_by_shapes: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Lists of lists."""
        _expect_lists(*entries)

    def run_rows(self, *entries: Entry) -> Entry:
        """The values stay where they are."""
        entry = sole(NestedRagged, entries)
        return Ragged(entry.values, entry.inner[entry.outer])


@dataclass(frozen=True)
class FillLists(RowOp):
    """Rows of lists of lists, filled up with empty lists at the end, so that all have equally many."""

    length: int
    name: ClassVar[str] = "fill_lists"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"fill_lists expects a length of at least 1, but received {self.length}.")

    def check(self, *entries: Entry) -> None:
        """Lists of lists."""
        _expect_lists(*entries)

    def run_rows(self, *entries: Entry) -> Entry:
        """Sets the size of each list at its place among all places; on a GPU this waits for it."""
        entry = sole(NestedRagged, entries)
        longest = int(entry.outer.diff().max()) if entry.rows else 0
        if longest > self.length:
            raise ValueError(
                f"expected rows of at most {self.length} lists, but received a row of {longest}; truncate "
                "cuts them."
            )
        sizes = entry.inner.diff()
        row, column = row_positions(entry.outer, sizes.shape[0])
        places = sizes.new_zeros(entry.rows * self.length).index_put((row * self.length + column,), sizes)
        outer = torch.arange(entry.rows + 1, device=row.device) * self.length
        return NestedRagged(entry.values, offsets_from(places), outer)


@dataclass(frozen=True)
class FillEmpty(RowOp):
    """One value, of weight 1, in each row that has none."""

    value: Number
    name: ClassVar[str] = "fill_empty"

    def check(self, *entries: Entry) -> None:
        """A Ragged of numbers or ids."""
        (entry,) = entries
        if not isinstance(entry, Ragged) or is_text(entry) or entry.values.dim() != 1:
            raise TypeError(f"expected a Ragged of numbers or ids, but received {describe_for_lists(entry)}.")
        _expect_fitting(self.value, entry)
        check_rows(entry)

    def run_rows(self, *entries: Entry) -> Entry:
        """Shifts each value by the number of empty rows before it."""
        entry = sole(Ragged, entries)
        if entry.offsets is None:
            return entry
        lengths = entry.offsets.diff()
        offsets = offsets_from(lengths.clamp(min=1))
        count = entry.values.shape[0]
        row = row_numbers(lengths, count)
        index = torch.arange(count, device=row.device) + (offsets - entry.offsets)[row]
        total = int(offsets[-1])
        values = entry.values.new_full((total,), self.value).index_put((index,), entry.values)
        weights = entry.weights
        if weights is not None:
            weights = weights.new_ones(total).index_put((index,), weights)
        return Ragged(values, offsets, weights)
