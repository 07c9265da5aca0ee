"""Rows side by side: how entries of several features become one entry, and its result becomes several again.

Every transform works on each row for itself, so one call over all rows of many features gives what many calls
would give. Nothing here changes a tensor it was given; results may share memory with inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from karvan.ragged import NestedRagged, Ragged

Entry = Ragged | NestedRagged | Tensor


def values_of(entry: Entry) -> Tensor:
    """The values without their rows."""
    return entry if isinstance(entry, Tensor) else entry.values


def with_values(entry: Entry, values: Tensor) -> Entry:
    """The same rows, and weights, of other values."""
    values = values.reshape(values_of(entry).shape)
    if isinstance(entry, Ragged):
        return Ragged(values, entry.offsets, entry.weights)
    if isinstance(entry, NestedRagged):
        return NestedRagged(values, entry.inner, entry.outer)
    return values


def rows_of(entry: Entry) -> int:
    """The number of rows."""
    return int(entry.shape[0]) if isinstance(entry, Tensor) else entry.rows


def is_text(entry: Entry) -> bool:
    """Whether the entry holds strings: a Ragged of bytes is one a row, a NestedRagged a list of them."""
    return not isinstance(entry, Tensor) and entry.values.dtype == torch.uint8


def describe(entry: Entry) -> str:
    """The entry in an error's words."""
    if isinstance(entry, Tensor):
        return f"a Tensor of {entry.dtype} and shape {tuple(entry.shape)}"
    kind = type(entry).__name__
    if is_text(entry):
        return f"a {kind} of bytes (strings)"
    weighted = " with weights" if isinstance(entry, Ragged) and entry.weights is not None else ""
    return f"a {kind} of {entry.values.dtype}{weighted}"


def kind_of(entry: Entry) -> Hashable:
    """What two entries must have in common to be joined."""
    values = values_of(entry)
    common = (type(entry).__name__, values.dtype, values.device, tuple(values.shape[1:]))
    if isinstance(entry, Ragged):
        weights = None if entry.weights is None else entry.weights.dtype
        return (*common, weights, entry.offsets is None)
    return common


def check_rows(entry: Entry) -> None:
    """Refuse offsets that do not tile the values; reading along them would mix rows up silently."""
    if isinstance(entry, Ragged):
        if entry.offsets is not None and _broken(entry.offsets, entry.values.shape[0]):
            entry.validate()
    elif isinstance(entry, NestedRagged):
        if _broken(entry.inner, entry.values.shape[0]):
            entry.lists().validate()
        lists = entry.inner[1:]
        if _broken(entry.outer, lists.shape[0]):
            Ragged(lists, entry.outer).validate()


def _broken(offsets: Tensor, count: int) -> bool:
    return bool((offsets.diff() < 0).any() | (offsets[0] != 0) | (offsets[-1] != count))


def join_rows(entries: Sequence[Entry]) -> Entry:
    """One entry with the rows of all, which are of one kind."""
    first = entries[0]
    if len(entries) == 1:
        return first
    values = torch.cat([values_of(entry) for entry in entries])
    raggeds = [entry for entry in entries if isinstance(entry, Ragged)]
    if isinstance(first, Ragged):
        weights = [entry.weights for entry in raggeds if entry.weights is not None]
        offsets = [entry.offsets for entry in raggeds if entry.offsets is not None]
        return Ragged(
            values, join_offsets(offsets) if offsets else None, torch.cat(weights) if weights else None
        )
    nested = [entry for entry in entries if isinstance(entry, NestedRagged)]
    if isinstance(first, NestedRagged):
        inner = join_offsets([entry.inner for entry in nested])
        return NestedRagged(values, inner, join_offsets([entry.outer for entry in nested]))
    return values


def join_offsets(offsets: Sequence[Tensor]) -> Tensor:
    """The offsets of rows that lie one after the other."""
    return offsets_from(torch.cat([part.diff() for part in offsets]))


def offsets_from(lengths: Tensor) -> Tensor:
    """The offsets of rows of these lengths."""
    offsets = lengths.new_zeros(lengths.shape[0] + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def split_rows(entry: Entry, counts: Sequence[int]) -> list[Entry]:
    """The first `counts[0]` rows, the next `counts[1]` rows, and so on."""
    if len(counts) == 1:
        return [entry]
    rows = list(accumulate(counts, initial=0))
    if isinstance(entry, Tensor):
        return [entry[a:b] for a, b in pairwise(rows)]
    if isinstance(entry, NestedRagged):
        lists, outer = _cut(entry.outer, rows)
        bounds, inner = _cut(entry.inner, lists)
        return [
            NestedRagged(entry.values[a:b], *offsets)
            for (a, b), *offsets in zip(pairwise(bounds), inner, outer, strict=True)
        ]
    bounds = rows
    offsets: Sequence[Tensor | None] = [None] * len(counts)
    if entry.offsets is not None:
        bounds, offsets = _cut(entry.offsets, rows)
    return [
        Ragged(entry.values[a:b], part, None if entry.weights is None else entry.weights[a:b])
        for (a, b), part in zip(pairwise(bounds), offsets, strict=True)
    ]


def _cut(offsets: Tensor, rows: list[int]) -> tuple[list[int], Sequence[Tensor]]:
    """Where the values of each run of rows begin and end, and the offsets within each."""
    bounds = offsets[torch.tensor(rows, device=offsets.device)].tolist()
    parts = [offsets[a : b + 1] - start for (a, b), start in zip(pairwise(rows), bounds, strict=False)]
    return bounds, parts


def as_ragged(entry: Ragged | Tensor) -> Ragged:
    """A tensor's rows as a Ragged: one value a row of a 1-D tensor, all columns of a 2-D one."""
    if isinstance(entry, Ragged):
        return entry
    if entry.dim() == 1:
        return Ragged(entry)
    rows, columns = entry.shape[:2]
    return Ragged(entry.flatten(0, 1), torch.arange(rows + 1, device=entry.device) * columns)


def row_numbers(lengths: Tensor, total: int) -> Tensor:
    """For each value the number of its row."""
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    return torch.repeat_interleave(rows, lengths, output_size=total)


def take(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Which values lie in the given slices, one after the other, and the offsets of the slices among them."""
    offsets = offsets_from(lengths)
    total = int(offsets[-1])
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return shift + torch.arange(total, device=starts.device), offsets


def keep(entry: Ragged, kept: Tensor) -> Ragged:
    """The values that are marked, in their rows."""
    offsets = as_offsets(entry)
    before = offsets_from(kept.to(torch.int64))
    weights = None if entry.weights is None else entry.weights[kept]
    return Ragged(entry.values[kept], before[offsets], weights)


def as_offsets(entry: Ragged) -> Tensor:
    """The offsets, also where None stands for one value a row."""
    if entry.offsets is not None:
        return entry.offsets
    return torch.arange(entry.rows + 1, device=entry.values.device)
