"""Truncation of sequences, each feature to its own length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from karvan.batch_slicing import as_offsets
from karvan.features.ops.base import GroupRowOp, Op, spread
from karvan.features.ops.layout import check_rows, describe, describe_for_lists, kind_of, take
from karvan.ragged import Entry, NestedRagged, Ragged


@dataclass(frozen=True)
class Truncate(GroupRowOp):
    """Rows cut to a length. Side "left" cuts on the left and keeps the last values, "right" the first.

    Of lists of lists, level "outer" limits the lists in a row, "inner" the values in each list.
    """

    length: int
    side: str
    level: str
    name: ClassVar[str] = "truncate"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"truncate expects a length of at least 1, but received {self.length}.")
        if self.side not in ("left", "right"):
            raise ValueError(f"truncate expects the side 'left' or 'right', but received '{self.side}'.")
        if self.level not in ("outer", "inner"):
            raise ValueError(f"truncate expects the level 'outer' or 'inner', but received '{self.level}'.")

    def check(self, *entries: Entry) -> None:
        """Rows of several values; lists of lists for the inner level."""
        (entry,) = entries
        check_rows(entry)
        if isinstance(entry, Tensor) and entry.dim() < 2:
            raise ValueError(f"expected rows of several values, but received {describe_for_lists(entry)}.")
        if self.level == "inner" and not isinstance(entry, NestedRagged):
            raise TypeError(f"expected lists of lists for level 'inner', but received {describe(entry)}.")

    def fuse_key(self, *entries: Entry) -> Hashable:
        """Lengths of ragged rows may differ."""
        length = self.length if isinstance(entries[0], Tensor) else None
        return (self.side, self.level, length, kind_of(entries[0]))

    @classmethod
    def run_joined(cls, ops: Sequence[Op], joined: list[Entry], counts: list[int]) -> Entry:
        """Cuts each row to its own op's length."""
        own = [op for op in ops if isinstance(op, Truncate)]
        first, (entry,) = own[0], joined
        left = first.side == "left"
        if isinstance(entry, Tensor):
            return entry[:, -first.length :] if left else entry[:, : first.length]
        if isinstance(entry, NestedRagged):
            if first.level == "outer":
                (limit,) = spread([(op.length,) for op in own], counts, entry.outer)
                return _truncate_lists(entry, limit, left)
            each = as_per_row([op.length for op in own], counts, entry.outer)
            limit = torch.repeat_interleave(each, entry.outer.diff(), output_size=entry.inner.shape[0] - 1)
            cut = _truncate(entry.lists(), limit, left)
            return NestedRagged(cut.values, as_offsets(cut), entry.outer)
        (limit,) = spread([(op.length,) for op in own], counts, as_offsets(entry))
        return _truncate(entry, limit, left)


def as_per_row(numbers: Sequence[int], counts: Sequence[int], like: Tensor) -> Tensor:
    """Each number once for each of its rows."""
    each = torch.tensor(numbers, device=like.device)
    return torch.repeat_interleave(each, torch.tensor(counts, device=like.device), output_size=sum(counts))


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


def _truncate_lists(entry: NestedRagged, limit: Tensor, left: bool) -> NestedRagged:
    slices = _limits(entry.outer, limit, left)
    if slices is None:
        return entry
    lists, outer = take(*slices)
    index, inner = take(entry.inner[lists], entry.inner.diff()[lists])
    return NestedRagged(entry.values[index], inner, outer)
