"""Transforms of numbers: logarithms, limits, statistics, missing values."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from typing_extensions import override

from karvan import kernels
from karvan.features.ops.base import (
    DERIVED,
    ElementOp,
    GroupElementOp,
    Number,
    describe,
    expect_numbers,
    flat_values,
    floats,
    in_type_of,
    repeated,
    with_values,
    without_nan,
)
from karvan.features.ops.fitted import FittedOp, Moments, RunningStatistics
from karvan.native import _native
from karvan.ragged import Entry, OptionalRagged, Ragged, as_offsets, values_of

_WORTH_POOLING = 32_768  # values; from this size on, an allocator fetches memory from the system each time
INT64 = torch.iinfo(torch.int64)


class NumberOp(ElementOp):
    """An element op on numbers of any type."""

    def check(self, *entries: Entry) -> None:
        """Strings are not numbers."""
        expect_numbers(*entries)


@dataclass(frozen=True)
class Log(NumberOp):
    """The logarithm to a base, as floats."""

    base: float
    name: ClassVar[str] = "log"

    def __post_init__(self) -> None:
        if not (self.base > 0 and self.base != 1 and math.isfinite(self.base)):
            raise ValueError(f"log expects a base above 0 other than 1, but received {self.base}.")

    def settings(self) -> Hashable:
        """Bases may differ."""
        return None

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """What a natural logarithm is divided by."""
        return (float(math.log(self.base)),)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """log x / log base."""
        return in_type_of(values, torch.log(floats(values)) / parameters[0])


@dataclass(frozen=True)
class Clip(NumberOp):
    """Numbers moved to the nearest within limits; integers stay integers where the limits are."""

    low: Number | None
    high: Number | None
    name: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("clip expects a lower or an upper limit, but received neither.")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ValueError(f"clip expects low <= high, but received {self.low} and {self.high}.")

    def settings(self) -> Hashable:
        """Limits may differ, not whether they are integers."""
        return self._whole()

    def _whole(self) -> bool:
        return not isinstance(self.low, float) and not isinstance(self.high, float)

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """Both limits; a missing one excludes nothing."""
        whole = self._whole() and not dtype.is_floating_point
        low = (INT64.min if whole else -math.inf) if self.low is None else self.low
        high = (INT64.max if whole else math.inf) if self.high is None else self.high
        return (low, high) if whole else (float(low), float(high))

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """NaN stays NaN."""
        low, high = parameters
        result = values.to(torch.int64) if not low.is_floating_point() else floats(values)
        # torch is much faster with numbers than with tensors of one, but to read one from a GPU is to wait.
        if not kernels.on_gpu(low) and low.numel() == 1:
            result = torch.clamp(result, low.item(), high.item())
        else:
            result = torch.clamp(result, low, high)
        return in_type_of(values, result)


@dataclass(frozen=True)
class Log1p(NumberOp):
    """log(1 + x), as floats; of clipped numbers with `clip`, which holds a clip step before it."""

    clip: Clip | None = None
    name: ClassVar[str] = "log1p"

    def settings(self) -> Hashable:
        """Limits may differ."""
        return None if self.clip is None else self.clip.settings()

    @classmethod
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """Uses the native core where possible: one call for all, nearly twice as fast as torch."""
        entries = [entry for (entry,) in arguments]
        values = [flat_values(entry) for entry in entries]
        if any(not value.is_cpu or value.dtype != torch.float32 or value.requires_grad for value in values):
            return super().run_group(ops, arguments)
        limits = [op.clip.parameters(torch.float32) for op in ops if op.clip]
        outputs = _empty_like(values)
        _native.log1p(
            [value.contiguous().numpy() for value in values],
            [output.numpy() for output in outputs],
            [float(low) for low, _ in limits] or [-math.inf] * len(values),
            [float(high) for _, high in limits] or [math.inf] * len(values),
        )
        return [with_values(entry, output) for entry, output in zip(entries, outputs, strict=True)]

    @classmethod
    def compute_group(cls, ops: Sequence[Self], values: Tensor, counts: Sequence[int]) -> Tensor:
        """Clips first, as a separate step would."""
        clips = [op.clip for op in ops if op.clip]
        if clips:
            values = Clip.compute_group(clips, values, counts)
        return super().compute_group(ops, values, counts)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """Exact also where x is tiny; half precision is computed in single."""
        return in_type_of(values, torch.log1p(floats(values)))


def _empty_like(values: Sequence[Tensor]) -> list[Tensor]:
    """Memory for as many floats; large ones from the core's pool, since clearing fresh pages is slow."""
    counts = [int(value.shape[0]) for value in values]
    total = sum(counts)
    if total < _WORTH_POOLING:
        memory = torch.empty(total)
    else:
        memory = torch.frombuffer(_native.Buffer(4 * total), dtype=torch.float32, count=total)
    return list(torch.split(memory, counts))


@dataclass(frozen=True)
class Normalise(NumberOp, FittedOp):
    """(x - mean) / std, as floats; without statistics, the engine's `fit` computes them."""

    mean: float | None = None
    std: float | None = None
    name: ClassVar[str] = "normalise"

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise ValueError(
                f"normalise expects mean and std, or neither, but received {self.mean} and {self.std}."
            )
        if self.std is not None and not (self.std > 0 and math.isfinite(self.std)):
            raise ValueError(f"normalise expects a positive std, but received {self.std}.")

    def check(self, *entries: Entry) -> None:
        """Numbers, and statistics."""
        super().check(*entries)
        if self.mean is None:
            raise ValueError("there are no statistics yet: pass mean and std, or call the engine's fit.")

    @property
    @override
    def ready(self) -> bool:
        return self.mean is not None

    @override
    def statistics(self) -> Moments:
        return Moments()

    @override
    def fitted(self, statistics: RunningStatistics) -> Normalise:
        assert isinstance(statistics, Moments)
        if not statistics.count:
            raise ValueError("expected values to fit, but there were none.")
        return Normalise(statistics.mean, statistics.std)

    def fit_state(self) -> Tensor | None:
        """Mean and standard deviation."""
        return None if self.mean is None else torch.tensor([self.mean, self.std], dtype=torch.float64)

    @override
    def with_state(self, state: Any) -> Normalise:
        if not isinstance(state, Tensor) or state.shape != (2,):
            raise ValueError(f"expected a mean and a standard deviation, but received {_brief(state)}.")
        return Normalise(*state.tolist())

    def settings(self) -> Hashable:
        """Statistics may differ."""
        return None

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """Mean and standard deviation."""
        return (float(cast(float, self.mean)), float(cast(float, self.std)))

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """Half precision is computed in single."""
        mean, std = parameters
        return in_type_of(values, (floats(values) - mean) / std)


def _brief(state: Any) -> str:
    return f"a tensor of shape {tuple(state.shape)}" if isinstance(state, Tensor) else type(state).__name__


@dataclass(frozen=True)
class FillMissing(NumberOp):
    """A value instead of missing ones: for NaN, for `missing` if it is set, and for samples without any.

    Integers have no NaN: a column of them with missing values is a Ragged of at most one value per sample,
    which this step turns into a tensor.
    """

    value: Number
    missing: Number | None = None
    name: ClassVar[str] = "fill_missing"
    takes_missing: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Integers are not filled with fractions, and lists have no position for missing values."""
        super().check(*entries)
        (entry,) = entries
        if values_of(entry).is_floating_point():
            return
        if isinstance(self.value, float) or isinstance(self.missing, float):
            for_what = "missing ones" if self.missing is None else self.missing
            raise TypeError(
                f"expected integers to fill {describe(entry)} with, but received {self.value} for {for_what}."
            )
        if self.missing is None and not _at_most_one(entry):
            raise TypeError(
                "expected floats, or at most one integer per sample, or the integer that "
                f"represents a missing one (missing=…), but received {describe(entry)}."
            )

    def settings(self) -> Hashable:
        """Values may differ, not whether NaN is what is missing."""
        return self.missing is None

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """The value, and what it replaces."""
        missing = 0 if self.missing is None else self.missing
        return (float(self.value), float(missing)) if dtype.is_floating_point else (self.value, missing)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """Keeps the type of the values."""
        value, missing = parameters
        if self.missing is not None:
            is_missing = values == missing.to(values.dtype)
        elif values.is_floating_point():
            is_missing = values.isnan()
        else:
            return values
        return torch.where(is_missing, value.to(values.dtype), values)

    @classmethod
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """Fills samples without a value at the end."""
        filled = super().run_group(ops, arguments)
        return [op._complete(entry) for op, entry in zip(ops, filled, strict=True)]

    def _complete(self, entry: Entry) -> Entry:
        if not isinstance(entry, Ragged):
            return entry
        integers = self.missing is None and not entry.values.is_floating_point()
        if not (isinstance(entry, OptionalRagged) or integers):
            return entry
        filled = entry.values.new_full((entry.rows, *entry.values.shape[1:]), self.value)
        count = entry.values.shape[0]
        if kernels.on_gpu(filled) and count:  # to write where a mask is set would wait for the GPU
            index = as_offsets(entry)[:-1].clamp(max=count - 1)
            present = (entry.lengths() > 0).reshape(-1, *[1] * (filled.dim() - 1))
            return torch.where(present, entry.values[index], filled)
        filled[entry.lengths() > 0] = entry.values
        return filled


def _at_most_one(entry: Entry) -> bool:
    if isinstance(entry, Tensor | OptionalRagged):
        return True
    return isinstance(entry, Ragged) and (entry.rows == 0 or int(entry.lengths().max()) <= 1)


@dataclass(frozen=True)
class Round(NumberOp):
    """Floats rounded to a number of digits, half to even."""

    digits: int
    name: ClassVar[str] = "round"

    def check(self, *entries: Entry) -> None:
        """Integers are round already."""
        super().check(*entries)
        if not values_of(entries[0]).is_floating_point():
            raise TypeError(f"expected floats, but received {describe(entries[0])}.")

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """Half precision is computed in single."""
        return torch.round(floats(values), decimals=self.digits).to(values.dtype)


# Transforms from numbers to small ids: the nearest integer, or the interval of a number.


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
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """NaN gets no id unless there is a default."""
        certain = [op.filled or op.default is not None for op in ops]
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
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """NaN gets no id."""
        certain = [op.filled for op in ops]
        return without_nan(super().run_group(ops, arguments), [entry for (entry,) in arguments], certain)

    @classmethod
    def compute_group(cls, ops: Sequence[Self], values: Tensor, counts: Sequence[int]) -> Tensor:
        """One search among the boundaries of all ops; a table maps the result to the bucket of each op.

        torch's search and lookup suit a GPU as well: two passes over the values, and nothing waits.
        """
        boundaries = tuple(op.boundaries for op in ops)
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
