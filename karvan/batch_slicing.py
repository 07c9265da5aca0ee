"""Splits batches into runs of consecutive samples, and joins them.

The parts of a split share memory with the batch. No input tensor is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from karvan.ragged import Batch, Entry, NestedRagged, OptionalRagged, OptionalText, Ragged


def values_of(entry: Entry) -> Tensor:
    """The values without the offsets."""
    return entry if isinstance(entry, Tensor) else entry.values


def rows_of(entry: Entry) -> int:
    """The number of rows."""
    return int(entry.shape[0]) if isinstance(entry, Tensor) else entry.rows


def as_offsets(entry: Ragged) -> Tensor:
    """The offsets, created where None means one value per row."""
    if entry.offsets is not None:
        return entry.offsets
    return torch.arange(entry.rows + 1, device=entry.values.device)


def offsets_from(lengths: Tensor) -> Tensor:
    """The offsets of rows of these lengths."""
    offsets = lengths.new_zeros(lengths.shape[0] + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def join_batches(batches: Sequence[Batch]) -> Batch:
    """One batch with the samples of all, which have the same entries; see `join_rows` for their kinds."""
    if len(batches) == 1:
        return batches[0]
    return Batch({name: join_rows([batch[name] for batch in batches]) for name in batches[0]})


def join_rows(entries: Sequence[Entry]) -> Entry:
    """One entry with the rows of all, which are of one kind, except that values may be missing in some."""
    first = entries[0]
    if len(entries) == 1:
        return first
    kinds = {Tensor if isinstance(entry, Tensor) else type(entry) for entry in entries}
    if len(kinds) > 1:
        entries = _one_kind(entries)
        first = entries[0]
    values = torch.cat([values_of(entry) for entry in entries])
    raggeds = [entry for entry in entries if isinstance(entry, Ragged)]
    if isinstance(first, Ragged):
        weights = [entry.weights for entry in raggeds if entry.weights is not None]
        plain = all(entry.offsets is None for entry in raggeds)
        offsets = None if plain else join_offsets([as_offsets(entry) for entry in raggeds])
        return type(first)(values, offsets, torch.cat(weights) if weights else None)
    nested = [entry for entry in entries if isinstance(entry, NestedRagged)]
    if isinstance(first, NestedRagged):
        inner = join_offsets([entry.inner for entry in nested])
        return type(first)(values, inner, join_offsets([entry.outer for entry in nested]))
    return values


def _one_kind(entries: Sequence[Entry]) -> list[Entry]:
    """The same entries in the kind that holds all of them: complete ones beside those with missing values."""
    if any(isinstance(entry, NestedRagged) for entry in entries):
        text = all(isinstance(entry, Ragged | OptionalText) for entry in entries)
        nested: type[NestedRagged] = OptionalText if text else NestedRagged
        return [
            nested(entry.values, as_offsets(entry), torch.arange(entry.rows + 1, device=entry.values.device))
            if isinstance(entry, Ragged)
            else entry
            for entry in entries
        ]
    one_value = all(isinstance(entry, Tensor | OptionalRagged) for entry in entries)
    kind = OptionalRagged if one_value else Ragged
    return [
        _ragged_of(kind, entry)
        if isinstance(entry, Tensor)
        else kind(entry.values, as_offsets(entry), entry.weights)
        for entry in entries
        if isinstance(entry, Tensor | Ragged)
    ]


def _ragged_of(kind: type[Ragged], entry: Tensor) -> Ragged:
    """A tensor's rows, of one value or of one for each column."""
    count = entry.shape[1] if entry.dim() == 2 else 1
    return kind(entry.reshape(-1), torch.arange(entry.shape[0] + 1, device=entry.device) * count)


def join_offsets(offsets: Sequence[Tensor]) -> Tensor:
    """The offsets of the rows of all, one part after the other."""
    return offsets_from(torch.cat([part.diff() for part in offsets]))


def split_batch(batch: Batch, counts: Sequence[int]) -> list[Batch]:
    """The first `counts[0]` samples, the next `counts[1]`, and so on; the counts add up to all samples."""
    if not len(batch):
        return [batch] * len(counts)
    columns = [split_rows(entry, counts) for entry in batch.values()]
    return [
        Batch.trusted(dict(zip(batch, entries, strict=True)), count)
        for count, *entries in zip(counts, *columns, strict=True)
    ]


def split_rows(entry: Entry, counts: Sequence[int]) -> list[Entry]:
    """The first `counts[0]` rows, the next `counts[1]` rows, and so on."""
    if len(counts) == 1:
        return [entry]
    if isinstance(entry, Tensor):
        return list(torch.unsafe_split_with_sizes(entry, counts))
    rows = list(accumulate(counts, initial=0))
    if isinstance(entry, NestedRagged):
        lists, outer = _cut(entry.outer, rows)
        bounds, inner = _cut(entry.inner, lists)
        nested = [
            type(entry)(entry.values[a:b], *offsets)
            for (a, b), *offsets in zip(pairwise(bounds), inner, outer, strict=True)
        ]
        return [complete(item) for item in nested] if type(entry) is OptionalText else list(nested)
    bounds = rows
    offsets: Sequence[Tensor | None] = [None] * len(counts)
    if entry.offsets is not None:
        bounds, offsets = _cut(entry.offsets, rows)
    parts = [
        type(entry)(entry.values[a:b], part, None if entry.weights is None else entry.weights[a:b])
        for (a, b), part in zip(pairwise(bounds), offsets, strict=True)
    ]
    return [complete(part) for part in parts] if type(entry) is OptionalRagged else list(parts)


def complete(entry: Entry) -> Entry:
    """An entry whose values may be missing in the kind without missing values, if none is missing."""
    if isinstance(entry, OptionalRagged) and entry.values.shape[0] == entry.rows:
        return entry.values
    if isinstance(entry, OptionalText) and entry.inner.shape[0] == entry.outer.shape[0]:
        return Ragged(entry.values, entry.inner)
    return entry


def with_optional_values(entry: Entry) -> Entry:
    """The inverse of `complete`: the kind that can hold missing values, whether or not some are missing."""
    if isinstance(entry, Tensor) and entry.dim() == 1 and not entry.is_floating_point():
        return _ragged_of(OptionalRagged, entry)
    if type(entry) is Ragged and entry.values.dtype is torch.uint8:
        return OptionalText(entry.values, as_offsets(entry), torch.arange(entry.rows + 1))
    return entry


def _cut(offsets: Tensor, rows: list[int]) -> tuple[list[int], Sequence[Tensor]]:
    """The bounds of the values of each run of rows, and the offsets within each run."""
    bounds = offsets[torch.tensor(rows, device=offsets.device)].tolist()
    parts = [offsets[a : b + 1] - start for (a, b), start in zip(pairwise(rows), bounds, strict=False)]
    return bounds, parts
