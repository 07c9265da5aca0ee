"""The ids of a feature for the combiner "index": a lookup of distinct ids, and which of them samples have.

The store is asked for lists of ids, which it pools: one without ids, whose vector of zeros is for padding,
one for each distinct id, and lists of all further occurrences. The vectors of those last lists are not used,
but by them ids are counted as with every other combiner, for policies that depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from karvan.store.remote.output_layout import RowIndex

_LONGEST = 256  # ids of a list of further occurrences, so that lists are pooled in parallel


class DistinctIds(NamedTuple):
    """What is looked up: lists of ids, whose sums `row_index` refers to."""

    values: Tensor
    offsets: Tensor
    row_index: RowIndex


def find_distinct(values: Tensor, offsets: Tensor | None, weights: Tensor | None, length: int) -> DistinctIds:
    """The distinct ids among the first `length` of each sample, in ascending order.

    offsets: where the ids of samples start, without errors; None: each sample has one id.
    """
    device = values.device
    if offsets is None:
        offsets = torch.arange(values.shape[0] + 1, device=device)
    lengths, samples = offsets.diff(), offsets.shape[0] - 1
    # The cell of each id, among (samples, length) cells.
    shifts = torch.arange(samples, device=device) * length - offsets[:-1]
    cells = torch.arange(values.shape[0], device=device) + shifts.repeat_interleave(lengths)
    if samples and int(lengths.max()) > length:
        ends = (torch.arange(samples, device=device) + 1) * length
        taken = cells < ends.repeat_interleave(lengths)
        cells, values = cells[taken], values[taken]
        weights = None if weights is None else weights[taken]
    distinct, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    if weights is not None:
        weights = _spread(weights, cells, samples, length)
    row_index = RowIndex(distinct.shape[0] + 1, _spread(inverse + 1, cells, samples, length), weights)
    again = distinct.repeat_interleave(counts - 1)
    starts = [
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.arange(distinct.shape[0], device=device),
        torch.arange(distinct.shape[0], values.shape[0], _LONGEST, device=device),
        torch.full((1,), values.shape[0], device=device),
    ]
    return DistinctIds(torch.cat([distinct, again]), torch.cat(starts), row_index)


def _spread(values: Tensor, cells: Tensor, samples: int, length: int) -> Tensor:
    """(samples, length), with values in these cells and zeros in others."""
    made = torch.zeros(samples * length, dtype=values.dtype, device=values.device)
    return made.scatter_(0, cells, values).view(samples, length)
