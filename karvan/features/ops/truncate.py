"""Truncation of sequences, each feature to its own length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from karvan import kernels
from karvan.batch_slicing import as_offsets, offsets_from
from karvan.features.ops.base import GroupRowOp, Op, spread
from karvan.features.ops.layout import (
    check_rows,
    describe,
    describe_for_lists,
    keep,
    kind_of,
    row_numbers,
    take,
)
from karvan.ragged import Entry, NestedRagged, Ragged


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
        own = [op for op in ops if isinstance(op, Truncate)]
        entries = [entry for (entry,) in arguments if not isinstance(entry, Tensor)]
        if not entries or not own[0]._by_kernels(entries[0]):
            return super().run_group(ops, arguments)
        return truncate_by_kernels(own, entries)

    @classmethod
    def run_joined(cls, ops: Sequence[Op], joined: list[Entry], counts: list[int]) -> Entry:
        """Cuts each row to its own op's length."""
        own = [op for op in ops if isinstance(op, Truncate)]
        first, (entry,) = own[0], joined
        left = first.side == "left"
        if isinstance(entry, Tensor):
            return entry[:, -first.length :] if left else entry[:, : first.length]
        offsets = first._limited(entry)
        (limit,) = spread([(op.length,) for op in own], counts, offsets)
        if isinstance(entry, NestedRagged) and first.level == "inner":
            each = limit.expand(entry.rows)
            limit = torch.repeat_interleave(each, entry.outer.diff(), output_size=entry.inner.shape[0] - 1)
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
