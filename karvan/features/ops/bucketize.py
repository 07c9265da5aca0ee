"""Transforms from numbers to small ids: the nearest integer, or the interval of a number."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from karvan.features.ops.base import DERIVED, GroupElementOp, Number, Op, expect_numbers, floats, repeated
from karvan.features.ops.missing_values import without_nan
from karvan.features.ops.numbers import INT64, NumberOp
from karvan.ragged import Entry


@dataclass(frozen=True)
class ToIds(NumberOp):
    """Numbers rounded to ids from 0 up to the number of buckets; a default for all others.

    Without a default, which is 0 then, NaN has no id. `filled`: the step before leaves no NaN.
    """

    buckets: int
    default: int | None
    filled: bool = field(default=False, metadata=DERIVED)
    name: ClassVar[str] = "to_ids"

    def __post_init__(self) -> None:
        if not 1 <= self.buckets <= 1 << 62:
            raise ValueError(f"to_ids expects from 1 to 2**62 buckets, but received {self.buckets}.")

    def settings(self) -> Hashable:
        """Buckets and defaults may differ, not whether there is a default."""
        return self.default is None

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """Number of buckets and default."""
        return (self.buckets, self.default or 0)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """Compares floats before the cast, since the cast of values out of range is undefined."""
        buckets, default = parameters
        if values.is_floating_point():
            whole = torch.round(values.to(torch.float64))
            fits = (whole >= 0) & (whole < buckets.to(torch.float64))
            return torch.where(fits, torch.where(fits, whole, 0).to(torch.int64), default)
        whole = values.to(torch.int64)
        return torch.where((whole >= 0) & (whole < buckets), whole, default)

    @classmethod
    def run_group(cls, ops: Sequence[Op], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """NaN gets no id unless there is a default."""
        own = [op for op in ops if isinstance(op, ToIds)]
        certain = [op.filled or op.default is not None for op in own]
        return without_nan(super().run_group(ops, arguments), [entry for (entry,) in arguments], certain)


@dataclass(frozen=True)
class Bucketize(GroupElementOp):
    """How many boundaries are not above the value: bucket 0 lies below the first, NaN in none.

    `filled`: the step before leaves no NaN.
    """

    boundaries: tuple[float, ...]
    filled: bool = field(default=False, metadata=DERIVED)
    name: ClassVar[str] = "bucketize"

    def __post_init__(self) -> None:
        listed = list(self.boundaries)
        if not listed or not all(map(math.isfinite, listed)) or any(a >= b for a, b in pairwise(listed)):
            raise ValueError(f"bucketize expects increasing finite boundaries, but received {listed}.")

    def check(self, *entries: Entry) -> None:
        """Numbers of any type."""
        expect_numbers(*entries)

    def settings(self) -> Hashable:
        """Boundaries may differ, unless there are so many that the table of all ops would be large."""
        return None if len(self.boundaries) <= 128 else self.boundaries

    @classmethod
    def run_group(cls, ops: Sequence[Op], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """NaN gets no id."""
        certain = [op.filled for op in ops if isinstance(op, Bucketize)]
        return without_nan(super().run_group(ops, arguments), [entry for (entry,) in arguments], certain)

    @classmethod
    def compute_group(cls, ops: Sequence[Op], values: Tensor, counts: Sequence[int]) -> Tensor:
        """One search among the boundaries of all ops; a table maps the result to the bucket of each op.

        torch's search and lookup suit a GPU as well: two passes over the values, and nothing waits.
        """
        boundaries = tuple(op.boundaries for op in ops if isinstance(op, Bucketize))
        alike = all(row == boundaries[0] for row in boundaries)
        dtype = values.dtype if values.is_floating_point() else torch.int64
        union, table = _table(boundaries[:1] if alike else boundaries, dtype, values.device)
        wide = floats if values.is_floating_point() else _whole
        index = torch.searchsorted(wide(union), wide(values), right=True)
        if alike:
            return table[index]
        first = torch.arange(len(ops), device=values.device) * (union.shape[0] + 1)
        return table[index + repeated(first, counts)]


def _whole(values: Tensor) -> Tensor:
    return values.to(torch.int64)


@functools.lru_cache(maxsize=256)
def _table(
    boundaries: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """All boundaries in order, and the bucket for each op and each index among them.

    Boundaries take the type of the values, so that 0.1 in a column of float32 equals the boundary 0.1; an
    integer is at or above a boundary if it is at or above the next integer.
    """
    with torch.inference_mode(False):
        if dtype.is_floating_point:
            rows = [torch.tensor(row, dtype=dtype).tolist() for row in boundaries]
        else:
            rows = [[min(max(math.ceil(b), INT64.min), INT64.max) for b in row] for row in boundaries]
        union = sorted({b for row in rows for b in row})
        buckets = [[0, *(bisect.bisect_right(row, b) for b in union)] for row in rows]
        table = torch.tensor(buckets, dtype=torch.int64).reshape(-1)
        return torch.tensor(union, dtype=dtype, device=device), table.to(device)
