"""Transforms of strings, which are rows of bytes. Letters and spaces are those of ASCII."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from karvan import kernels
from karvan.features.ops.base import ElementOp, GroupRowOp, Op, RowOp, expect_text, spread
from karvan.features.ops.layout import (
    check_rows,
    describe,
    describe_for_lists,
    is_text,
    keep,
    kind_of,
    row_numbers,
    take,
)
from karvan.ragged import Entry, NestedRagged, Ragged, as_offsets, offsets_from


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


# Truncation of sequences, each feature to its own length.


@dataclass(frozen=True)
class Truncate(GroupRowOp):
    """Rows cut to a length. Side "left" cuts on the left and keeps the last values, "right" the first.

    Side "top" keeps the values of the largest weights, in their order; of equal weights, the first. Of lists
    of lists, level "outer" limits the lists in a row, "inner" the values in each list. With `check` nothing
    is cut: a longer row is an error.
    """

    length: int
    side: str
    level: str
    check_length: bool = False
    name: ClassVar[str] = "truncate"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"truncate expects a length of at least 1, but received {self.length}.")
        if self.side not in ("left", "right", "top"):
            raise ValueError(
                f"truncate expects the side 'left', 'right' or 'top', but received '{self.side}'."
            )
        if self.level not in ("outer", "inner"):
            raise ValueError(f"truncate expects the level 'outer' or 'inner', but received '{self.level}'.")
        if self.side == "top" and self.level == "inner":
            raise ValueError("truncate expects the level 'outer' for the side 'top', but received 'inner'.")

    def check(self, *entries: Entry) -> None:
        """Rows of several values; lists of lists for the inner level."""
        (entry,) = entries
        check_rows(entry)
        if isinstance(entry, Tensor) and entry.dim() < 2:
            raise ValueError(f"expected rows of several values, but received {describe_for_lists(entry)}.")
        if self.level == "inner" and not isinstance(entry, NestedRagged):
            raise TypeError(f"expected lists of lists for level 'inner', but received {describe(entry)}.")
        if self.side == "top" and not (isinstance(entry, Ragged) and entry.weights is not None):
            raise TypeError(f"expected weights for the side 'top', but received {describe(entry)}.")
        if self.check_length and isinstance(entry, Tensor) and entry.shape[1] > self.length:
            raise self._too_long(int(entry.shape[1]))

    def _too_long(self, length: int, where: str = "rows", what: str = "values") -> ValueError:
        return ValueError(
            f"expected at most {self.length} {what}, but received {where} of {length}; without check the "
            "step cuts them."
        )

    def fuse_key(self, *entries: Entry) -> Hashable:
        """Lengths of ragged rows may differ; on a GPU everything may, since entries are not joined."""
        if not isinstance(entries[0], Tensor) and self._by_kernels(entries[0]):
            return ("kernels", entries[0].values.device)
        length = self.length if isinstance(entries[0], Tensor) else None
        return (self.side, self.level, self.check_length, length, kind_of(entries[0]))

    def _by_kernels(self, entry: Ragged | NestedRagged) -> bool:
        weights = entry.weights if isinstance(entry, Ragged) else None
        copied = kernels.may_copy(entry.values) and (weights is None or kernels.may_copy(weights))
        return copied and (self.side != "top" or self.check_length)

    @classmethod
    def run_group(cls, ops: Sequence[Op], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """On a GPU each entry by itself: to split joined rows would wait for the GPU once more."""
        truncations = [op for op in ops if isinstance(op, Truncate)]
        entries = [entry for (entry,) in arguments if not isinstance(entry, Tensor)]
        if not entries or not truncations[0]._by_kernels(entries[0]):
            return super().run_group(ops, arguments)
        return truncate_by_kernels(truncations, entries)

    @classmethod
    def run_joined(cls, ops: Sequence[Op], joined: list[Entry], counts: list[int]) -> Entry:
        """Cuts each row to its own op's length."""
        truncations = [op for op in ops if isinstance(op, Truncate)]
        first, (entry,) = truncations[0], joined
        left = first.side == "left"
        if isinstance(entry, Tensor):
            return entry[:, -first.length :] if left else entry[:, : first.length]
        offsets = first._limited(entry)
        (limit,) = spread([(op.length,) for op in truncations], counts, offsets)
        if isinstance(entry, NestedRagged) and first.level == "inner":
            limits = limit.expand(entry.rows)
            limit = torch.repeat_interleave(limits, entry.outer.diff(), output_size=entry.inner.shape[0] - 1)
        if first.check_length:
            first._check_lengths(entry, offsets.diff(), limit)
            return entry
        if isinstance(entry, Ragged):
            return _top(entry, limit) if first.side == "top" else _truncate(entry, limit, left)
        if first.level == "outer":
            return _truncate_lists(entry, limit, left)
        cut = _truncate(entry.lists(), limit, left)
        return NestedRagged(cut.values, as_offsets(cut), entry.outer)

    def _limited(self, entry: Ragged | NestedRagged) -> Tensor:
        """The offsets of what is cut."""
        if isinstance(entry, Ragged):
            return as_offsets(entry)
        return entry.inner if self.level == "inner" else entry.outer

    def _check_lengths(self, entry: Ragged | NestedRagged, lengths: Tensor, limit: Tensor | int) -> None:
        """Where ops run together, the error of each alone is the one that users see."""
        above = lengths > limit
        if bool(above.any()):
            first = int(above.nonzero()[0, 0])
            outer = self.level == "outer"
            what = "lists" if outer and isinstance(entry, NestedRagged) else "values"
            raise self._too_long(int(lengths[first]), "a row" if outer else "a list", what)


def _limits(offsets: Tensor, limit: Tensor, left: bool) -> tuple[Tensor, Tensor] | None:
    """The start and the number of the remaining values of each row; None if all remain."""
    lengths = offsets.diff()
    if not bool((lengths > limit).any()):
        return None
    counts = torch.minimum(lengths, limit)
    return (offsets[1:] - counts if left else offsets[:-1]), counts


def _truncate(entry: Ragged, limit: Tensor, left: bool) -> Ragged:
    slices = None if entry.offsets is None else _limits(entry.offsets, limit, left)
    if slices is None:
        return entry
    index, offsets = take(*slices)
    return Ragged(entry.values[index], offsets, None if entry.weights is None else entry.weights[index])


def _top(entry: Ragged, limit: Tensor) -> Ragged:
    """The values of the largest weights of each row."""
    if entry.offsets is None or _limits(entry.offsets, limit, left=False) is None:
        return entry
    assert entry.weights is not None
    lengths, count = entry.offsets.diff(), entry.values.shape[0]
    row = row_numbers(lengths, count)
    order = torch.argsort(entry.weights.detach(), descending=True, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    rank = torch.arange(count, device=row.device) - entry.offsets[row]  # of the sorted values
    mask = torch.empty_like(order, dtype=torch.bool)
    mask[order] = rank < limit.expand(entry.rows)[row]
    return keep(entry, mask)


def _truncate_lists(entry: NestedRagged, limit: Tensor, left: bool) -> NestedRagged:
    slices = _limits(entry.outer, limit, left)
    if slices is None:
        return entry
    lists, outer = take(*slices)
    index, inner = take(entry.inner[lists], entry.inner.diff()[lists])
    return NestedRagged(entry.values[index], inner, outer)


class _Slices(NamedTuple):
    """What remains of rows: the start of each, and the offsets of the result."""

    starts: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, offsets: Tensor, limit: int, left: bool) -> _Slices:
        counts = offsets.diff().clamp(max=limit)
        return cls(offsets[1:] - counts if left else offsets[:-1], offsets_from(counts))

    def within(self, inner: Tensor) -> _Slices:
        """The same for the values of lists, where these slices are of lists."""
        starts = inner[self.starts]
        ends = inner[self.starts + self.offsets.diff()]
        return _Slices(starts, offsets_from(ends - starts))


def truncate_by_kernels(ops: Sequence[Truncate], entries: Sequence[Ragged | NestedRagged]) -> list[Entry]:
    """Each entry cut to its op's length, by kernels.

    The sizes of the results depend on the data: this waits for the GPU, once for all entries.
    """
    plans: list[tuple[_Slices, ...]] = []
    for op, entry in zip(ops, entries, strict=True):
        left = op.side == "left"
        if isinstance(entry, Ragged):
            plans.append(() if entry.offsets is None else (_Slices.of(entry.offsets, op.length, left),))
        elif op.level == "inner":
            plans.append((_Slices.of(entry.inner, op.length, left),))
        else:
            lists = _Slices.of(entry.outer, op.length, left)
            plans.append((lists, lists.within(entry.inner)))
    ends = [slices.offsets[-1] for plan in plans for slices in plan]
    totals = iter(torch.stack(ends).tolist() if ends else [])
    return [
        _cut(op, entry, plan, [next(totals) for _ in plan])
        for op, entry, plan in zip(ops, entries, plans, strict=True)
    ]


def _cut(op: Truncate, entry: Ragged | NestedRagged, plan: tuple[_Slices, ...], totals: list[int]) -> Entry:
    from karvan.kernels.rows import slices

    if op.check_length:
        parts = entry.inner[1:] if isinstance(entry, NestedRagged) and op.level == "outer" else entry.values
        if plan and totals[0] != parts.shape[0]:
            op._check_lengths(entry, op._limited(entry).diff(), op.length)
        return entry
    if isinstance(entry, Ragged):
        if not plan or totals[0] == entry.values.shape[0]:
            return entry
        ((starts, offsets),) = plan
        weights = None if entry.weights is None else slices(entry.weights, starts, offsets, totals[0])
        return Ragged(slices(entry.values, starts, offsets, totals[0]), offsets, weights)
    starts, offsets = plan[-1]
    values = slices(entry.values, starts, offsets, totals[-1])
    if len(plan) == 1:
        return NestedRagged(values, offsets, entry.outer)
    first, outer = plan[0]
    return NestedRagged(values, offsets_from(slices(entry.inner.diff(), first, outer, totals[0])), outer)
