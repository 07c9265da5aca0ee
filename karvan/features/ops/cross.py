"""Transforms of several columns into one: crosses of ids, and concatenation."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from karvan import ids, kernels
from karvan.features.ops.base import RowOp, as_ragged, check_rows, describe, expect_ids, row_numbers
from karvan.ragged import (
    Entry,
    NestedRagged,
    OptionalRagged,
    Ragged,
    as_offsets,
    offsets_from,
    rows_of,
    values_of,
)


def _check_columns(entries: tuple[Entry, ...], nested: bool = False) -> None:
    """Columns of one device and equally many rows; `nested`: all of them may be lists of lists."""
    lists = nested and all(isinstance(entry, NestedRagged) for entry in entries)
    for entry in entries:
        deep = not lists if isinstance(entry, NestedRagged) else values_of(entry).dim() > 2
        if deep:
            others = ", or lists of lists in all columns" if nested else ""
            raise TypeError(
                f"expected Raggeds, or Tensors of 1 or 2 dimensions{others}, but received {describe(entry)}."
            )
        check_rows(entry)
    counts = [rows_of(entry) for entry in entries]
    if len(set(counts)) > 1:
        raise ValueError(f"expected columns of equally many rows, but received {counts}.")
    devices = {str(values_of(entry).device) for entry in entries}
    if len(devices) > 1:
        raise ValueError(f"expected columns on one device, but received {', '.join(sorted(devices))}.")


@dataclass(frozen=True)
class Cross(RowOp):
    """Every combination of the distinct ids that each row has in the columns (RecIS `FeatureCross`).

    A combination's id is the MurmurHash of its ids, its weight the product of their weights; of equal ids in
    a row the first counts. Combinations come in the order of the first column, then of the second, and so on.

    In columns of lists of lists the lists are what is crossed, the first of a row with the first of the
    others, and so on: a row must have equally many lists in all columns.
    """

    name: ClassVar[str] = "cross"
    joins: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Ids in plain rows, or in equally many lists a row."""
        _check_columns(entries, nested=True)
        for entry in entries:
            expect_ids(entry)
            if isinstance(entry, Ragged) and entry.values.dim() != 1:
                raise ValueError(f"expected plain ids, but received vectors, {describe(entry)}.")
        if isinstance(entries[0], NestedRagged):
            _check_lists([entry for entry in entries if isinstance(entry, NestedRagged)])

    def fuse_key(self, *entries: Entry) -> Hashable:
        """On a GPU crosses of lists may differ in everything, since they are not joined."""
        if not _needs_sizes(entries):
            return super().fuse_key(*entries)
        return ("kernels", values_of(entries[0]).device)

    @classmethod
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """On a GPU each cross of lists by itself: to split joined rows would wait for the GPU once more."""
        if not _needs_sizes(arguments[0]):
            return super().run_group(ops, arguments)
        from karvan.kernels.ids import combinations as by_kernels

        columns = [[_lists_of(entry) for entry in entries] for entries in arguments]
        crosses = zip(arguments, cross_lists(columns, by_kernels), strict=True)
        return [_crossed(entries, *parts) for entries, parts in crosses]

    def run_rows(self, *entries: Entry) -> Entry:
        """A tensor if every column has exactly one id a row, as tensors do."""
        columns = [_lists_of(entry) for entry in entries]
        if all(column.offsets is None for column in columns):
            hashes = murmur_words(torch.stack([column.values for column in columns], 1))
            if all(isinstance(entry, Tensor) for entry in entries):
                return hashes
            return Ragged(hashes, None, _product([column.weights for column in columns]))
        return _crossed(entries, *cross_lists([columns], combinations)[0])


def _needs_sizes(entries: tuple[Entry, ...]) -> bool:
    """Whether only a GPU knows how many combinations there are."""
    one_each = all(
        entry.dim() == 1 if isinstance(entry, Tensor) else isinstance(entry, Ragged) and entry.offsets is None
        for entry in entries
    )
    return not one_each and all(kernels.on_gpu(values_of(entry)) for entry in entries)


def _lists_of(entry: Entry) -> Ragged:
    """What is crossed: rows, or lists of rows of lists."""
    return entry.lists() if isinstance(entry, NestedRagged) else as_ragged(entry)


def _check_lists(entries: Sequence[NestedRagged]) -> None:
    first = entries[0]
    for entry in entries[1:]:
        alike = entry.inner.shape == first.inner.shape
        if alike and kernels.on_gpu(entry.values):
            from karvan.kernels.rows import check_equal

            check_equal(first.outer, entry.outer)  # stops the GPU, so that nothing waits for it
        elif not alike or not torch.equal(entry.outer, first.outer):
            different = (entry.outer != first.outer).nonzero()
            raise ValueError(
                "expected equally many lists a row in all columns, but received "
                f"{first.lengths()[different[0] - 1].item()} and {entry.lengths()[different[0] - 1].item()} "
                f"in row {int(different[0]) - 1}."
            )


def _crossed(entries: tuple[Entry, ...], values: Tensor, offsets: Tensor, weights: Tensor | None) -> Entry:
    if isinstance(entries[0], NestedRagged):
        return NestedRagged(values, offsets, entries[0].outer)
    kind = OptionalRagged if all(map(_at_most_one, entries)) else Ragged
    return kind(values, offsets, weights)


def _at_most_one(entry: Entry) -> bool:
    return isinstance(entry, OptionalRagged) or (isinstance(entry, Tensor) and entry.dim() == 1)


def _product(weights: list[Tensor | None]) -> Tensor | None:
    factors = [weight for weight in weights if weight is not None]
    if not factors:
        return None
    return functools.reduce(operator.mul, factors)


class _DistinctIds(NamedTuple):
    """The distinct ids of each row, the first of equal ones, at the start of its part of the values."""

    values: Tensor
    weights: Tensor | None
    starts: Tensor
    lengths: Tensor


def _distinct_ids(column: Ragged) -> _DistinctIds:
    """The distinct ids of a column. A GPU is not waited for: there is memory as if all were distinct."""
    offsets, count, waits = as_offsets(column), column.values.shape[0], not kernels.on_gpu(column.values)
    lengths = offsets.diff()
    alike = _DistinctIds(column.values, column.weights, offsets[:-1], lengths)
    if column.offsets is None or not count or (waits and int(lengths.max()) <= 1):
        return alike
    row = row_numbers(lengths, count)
    order = torch.argsort(column.values, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    values, row = column.values[order], row[order]
    new = (values[1:] != values[:-1]) | (row[1:] != row[:-1])
    if waits and bool(new.all()):
        return alike
    first = torch.ones_like(order, dtype=torch.bool).index_put_((order[1:],), new)
    before = offsets_from(first.to(torch.int64))
    # Where each id goes that is the first of its kind; others go behind the end.
    target = torch.where(first, before[:-1], count)
    numbers = torch.arange(count, device=order.device)
    index = order.new_zeros(count + 1).index_put_((target,), numbers)[:-1]
    bounds = before[offsets]
    weights = None if column.weights is None else column.weights[index]
    return _DistinctIds(column.values[index], weights, bounds[:-1], bounds.diff())


Combine: TypeAlias = Callable[
    [list[tuple[Tensor, Tensor, Tensor]], Tensor, Tensor], tuple[Tensor, list[Tensor]]
]


def cross_lists(
    crosses: Sequence[Sequence[Ragged]], combine: Combine
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Hashes, offsets and weights of each cross of columns, with `combinations` here or that of the kernels.

    The number of combinations depends on the data: this waits for a GPU, once for all crosses.
    """
    distinct = [[_distinct_ids(column) for column in columns] for columns in crosses]
    counts = [torch.stack([column.lengths for column in columns]).prod(0) for columns in distinct]
    offsets = [offsets_from(count) for count in counts]
    totals = torch.stack([offset[-1] for offset in offsets]).tolist()
    results: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for columns, count, bounds, total in zip(distinct, counts, offsets, totals, strict=True):
        parts = [(column.values, column.starts, column.lengths) for column in columns]
        hashes, indices = combine(parts, row_numbers(count, total), bounds)
        factors = [
            None if column.weights is None else column.weights[index]
            for column, index in zip(columns, indices, strict=True)
        ]
        results.append((hashes, bounds, _product(factors)))
    return results


def combinations(
    columns: list[tuple[Tensor, Tensor, Tensor]], row: Tensor, offsets: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The same as `combinations` of the kernels, in torch's arithmetic."""
    rest = torch.arange(row.shape[0], device=row.device) - offsets[row]
    indices: list[Tensor] = []
    for _, starts, lengths in reversed(columns):
        along = lengths[row]
        indices.insert(0, starts[row] + rest % along)
        rest = rest // along
    words = [values[index] for (values, _, _), index in zip(columns, indices, strict=True)]
    return murmur_words(torch.stack(words, 1)), indices


def murmur_words(words: Tensor) -> Tensor:
    """MurmurHash64A of each row of 64-bit words, by a kernel on a GPU, in torch's arithmetic elsewhere."""
    count, width = words.shape
    if kernels.on_gpu(words):
        from karvan.kernels.ids import murmur_words as hash_words

        return hash_words(words)
    if words.is_cpu:
        offsets = torch.arange(count + 1) * (8 * width)
        return ids.murmur(Ragged(words.contiguous().view(torch.uint8).reshape(-1), offsets))
    return murmur_words_anywhere(words)


def murmur_words_anywhere(words: Tensor) -> Tensor:
    """The same in torch's arithmetic, which wraps as the hash requires; shifts must be unsigned."""
    factor = 0xC6A4A7935BD1E995 - (1 << 64)

    def fold(x: Tensor) -> Tensor:
        return x ^ ((x >> 47) & ((1 << 17) - 1))

    seed = (8 * words.shape[1] * factor) & ((1 << 64) - 1)
    state = torch.full_like(words[:, 0], seed - (1 << 64) if seed >> 63 else seed)
    for word in words.unbind(1):
        state = (state ^ fold(word * factor) * factor) * factor
    return fold(fold(state) * factor)


@dataclass(frozen=True)
class Concat(RowOp):
    """Each row's values of all columns one after the other, each column's ids shifted by its offset.

    Tensors alone give a tensor. Where some columns have weights, the values of the others weigh 1.
    """

    offsets: tuple[int, ...] | None
    name: ClassVar[str] = "concat"
    joins: ClassVar[bool] = True
    sized_by_shapes: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Columns of one type, and an offset for each."""
        _check_columns(entries)
        if self.offsets is not None and len(self.offsets) != len(entries):
            raise ValueError(
                f"expected an offset for each of {len(entries)} columns, but received {len(self.offsets)}."
            )
        dtypes = {values_of(entry).dtype for entry in entries}
        if len(dtypes) > 1:
            raise TypeError(f"expected columns of one type, but received {', '.join(map(str, dtypes))}.")
        if self.offsets is not None:
            for entry in entries:
                expect_ids(entry)
        if (
            len({tuple(as_ragged(e).values.shape[1:]) for e in entries if not isinstance(e, NestedRagged)})
            > 1
        ):
            raise ValueError("expected columns of vectors of one size, but received several sizes.")

    def run_rows(self, *entries: Entry) -> Entry:
        """Scatters each column to its positions."""
        shifts = self.offsets or (0,) * len(entries)
        tensors = [entry for entry in entries if isinstance(entry, Tensor)]
        if len(tensors) == len(entries):
            shifted = [t + shift if shift else t for t, shift in zip(tensors, shifts, strict=True)]
            return torch.cat([t.reshape(t.shape[0], -1) if t.numel() else _columns(t) for t in shifted], 1)
        columns = [as_ragged(entry) for entry in entries if not isinstance(entry, NestedRagged)]
        lengths = [column.lengths() for column in columns]
        offsets = offsets_from(torch.stack(lengths).sum(0))
        sizes = [column.values.shape[0] for column in columns]
        total = sum(sizes)
        values = columns[0].values.new_empty((total, *columns[0].values.shape[1:]))
        kinds = [column.weights.dtype for column in columns if column.weights is not None]
        weights = torch.ones(total, dtype=kinds[0], device=values.device) if kinds else None
        start = offsets[:-1]
        for column, length, size, shift in zip(columns, lengths, sizes, shifts, strict=True):
            row = row_numbers(length, size)
            index = torch.arange(size, device=row.device) + (start - as_offsets(column)[:-1])[row]
            values = values.index_put((index,), column.values + shift if shift else column.values)
            if weights is not None and column.weights is not None:
                weights = weights.index_put((index,), column.weights.to(weights.dtype))
            start = start + length
        return Ragged(values, offsets, weights)


def _columns(empty: Tensor) -> Tensor:
    """A tensor without values, as rows and columns: torch cannot infer their numbers."""
    return empty.unsqueeze(1) if empty.dim() == 1 else empty
