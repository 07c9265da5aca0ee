"""Transforms of strings, which are rows of bytes. Letters and spaces are those of ASCII."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from karvan import kernels
from karvan.features.ops.base import (
    ElementOp,
    GroupRowOp,
    RowOp,
    check_rows,
    describe,
    describe_for_lists,
    expect_text,
    is_text,
    keep,
    kind_of,
    row_numbers,
    row_positions,
    sole,
    spread,
)
from karvan.ragged import Entry, NestedRagged, Ragged, as_offsets, offsets_from


class CaseOp(ElementOp):
    """The letters of one case become those of the other, which differ in one bit.

    Bytes of longer UTF-8 characters are 128 and above.
    """

    takes_text: ClassVar[bool] = True
    first: ClassVar[int]  # the byte of the first letter that changes

    def check(self, *entries: Entry) -> None:
        """Strings."""
        expect_text(*entries)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """Other bytes stay."""
        return torch.where((values >= self.first) & (values < self.first + 26), values ^ 32, values)


@dataclass(frozen=True)
class Lower(CaseOp):
    """A to Z become a to z."""

    name: ClassVar[str] = "lower"
    first: ClassVar[int] = ord("A")


@dataclass(frozen=True)
class Upper(CaseOp):
    """a to z become A to Z."""

    name: ClassVar[str] = "upper"
    first: ClassVar[int] = ord("a")


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
        row, position = row_positions(offsets, values.shape[0])
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
        values, offsets = _parts(sole(Ragged, entries))
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
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """On a GPU each entry by itself: to split joined rows would wait for the GPU once more."""
        entries = [entry for (entry,) in arguments if not isinstance(entry, Tensor)]
        if not entries or not ops[0]._by_kernels(entries[0]):
            return super().run_group(ops, arguments)
        return truncate(ops, entries, [op.length for op in ops], by_kernels=True)

    @classmethod
    def run_joined(cls, ops: Sequence[Self], joined: list[Entry], counts: list[int]) -> Entry:
        """Cuts each row to its own op's length."""
        first, (entry,) = ops[0], joined
        if isinstance(entry, Tensor):
            return entry[:, -first.length :] if first.side == "left" else entry[:, : first.length]
        offsets = first._limited(entry)
        (limit,) = spread([(op.length,) for op in ops], counts, offsets)
        if isinstance(entry, NestedRagged) and first.level == "inner":
            limits = limit.expand(entry.rows)
            limit = torch.repeat_interleave(limits, entry.outer.diff(), output_size=entry.inner.shape[0] - 1)
        if not bool((offsets.diff() > limit).any()):
            return entry
        return truncate([first], [entry], [limit], by_kernels=False)[0]

    def _limited(self, entry: Ragged | NestedRagged) -> Tensor:
        """The offsets of what is cut."""
        if isinstance(entry, Ragged):
            return as_offsets(entry)
        return entry.inner if self.level == "inner" else entry.outer

    def too_long(self, entry: Ragged | NestedRagged, limit: Tensor | int) -> ValueError:
        """The error of an entry with a longer row. Where ops run together, users see that of each alone."""
        lengths, outer = self._limited(entry).diff(), self.level == "outer"
        first = int((lengths > limit).nonzero()[0, 0])
        what = "lists" if outer and isinstance(entry, NestedRagged) else "values"
        return self._too_long(int(lengths[first]), "a row" if outer else "a list", what)


def _top(entry: Ragged, limit: Tensor | int) -> Ragged:
    """The values of the largest weights of each row."""
    assert entry.offsets is not None
    assert entry.weights is not None
    count = entry.values.shape[0]
    row = row_numbers(entry.offsets.diff(), count)
    order = torch.argsort(entry.weights.detach(), descending=True, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    rank = torch.arange(count, device=row.device) - entry.offsets[row]  # of the sorted values
    mask = torch.empty_like(order, dtype=torch.bool)
    mask[order] = rank < (limit if isinstance(limit, int) else limit.expand(entry.rows)[row])
    return keep(entry, mask)


class _Slices(NamedTuple):
    """What remains of rows: the start of each, and the offsets of the result."""

    starts: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, offsets: Tensor, limit: Tensor | int, left: bool) -> _Slices:
        counts = offsets.diff().clamp(max=limit)
        return cls(offsets[1:] - counts if left else offsets[:-1], offsets_from(counts))

    def within(self, inner: Tensor) -> _Slices:
        """The same for the values of lists, where these slices are of lists."""
        starts = inner[self.starts]
        ends = inner[self.starts + self.offsets.diff()]
        return _Slices(starts, offsets_from(ends - starts))

    def taker(self, total: int, by_kernels: bool) -> Callable[[Tensor], Tensor]:
        """What takes these slices of values, `total` of them, by a kernel or in torch's arithmetic."""
        starts, offsets = self
        if by_kernels:
            from karvan.kernels.rows import slices

            return lambda values: slices(values, starts, offsets, total)
        shift = torch.repeat_interleave(starts - offsets[:-1], offsets.diff(), output_size=total)
        index = shift + torch.arange(total, device=starts.device)
        return lambda values: values[index]


def truncate(
    ops: Sequence[Truncate],
    entries: Sequence[Ragged | NestedRagged],
    limits: Sequence[Tensor | int],
    *,
    by_kernels: bool,
) -> list[Entry]:
    """Each entry cut by its op to these lengths.

    The sizes of the results depend on the data: this waits for a GPU, once for all entries.
    """
    plans: list[tuple[_Slices, ...]] = []
    for op, entry, limit in zip(ops, entries, limits, strict=True):
        left = op.side == "left"
        if isinstance(entry, Ragged):
            plans.append(() if entry.offsets is None else (_Slices.of(entry.offsets, limit, left),))
        elif op.level == "inner":
            plans.append((_Slices.of(entry.inner, limit, left),))
        else:
            lists = _Slices.of(entry.outer, limit, left)
            plans.append((lists, lists.within(entry.inner)))
    ends = [part.offsets[-1] for plan in plans for part in plan]
    totals = iter(torch.stack(ends).tolist() if ends else [])
    return [
        _cut(op, entry, limit, plan, [next(totals) for _ in plan], by_kernels)
        for op, entry, limit, plan in zip(ops, entries, limits, plans, strict=True)
    ]


def _cut(
    op: Truncate,
    entry: Ragged | NestedRagged,
    limit: Tensor | int,
    plan: tuple[_Slices, ...],
    totals: list[int],
    by_kernels: bool,
) -> Entry:
    cuts_lists = isinstance(entry, NestedRagged) and op.level == "outer"
    rows = entry.lists() if isinstance(entry, NestedRagged) else entry
    if not plan or totals[0] == (rows.rows if cuts_lists else rows.values.shape[0]):
        return entry  # nothing is longer
    if op.check_length:
        raise op.too_long(entry, limit)
    if isinstance(entry, Ragged) and op.side == "top":
        return _top(entry, limit)
    take = plan[-1].taker(totals[-1], by_kernels)
    values, offsets = take(entry.values), plan[-1].offsets
    if isinstance(entry, Ragged):
        return Ragged(values, offsets, None if entry.weights is None else take(entry.weights))
    if not cuts_lists:
        return NestedRagged(values, offsets, entry.outer)
    sizes = plan[0].taker(totals[0], by_kernels)(entry.inner.diff())
    return NestedRagged(values, offsets_from(sizes), plan[0].offsets)
