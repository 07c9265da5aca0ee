"""Steps on columns with missing values: they run on the values that are there.

A column that lacks some values (`OptionalRagged`, `OptionalText`) must give the rows that it would give if
the batch had been cut differently. So steps see what they see of a complete column: a tensor, or one string
for each row. What they make is then put back into the rows that have a value.

Among floats NaN stands for a missing value. Ids have no such sign, so that a step which makes ids of floats
leaves the ids of NaN out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from karvan.batch_slicing import as_offsets, offsets_from, values_of
from karvan.features.ops.layout import describe, is_text, keep
from karvan.ragged import Entry, NestedRagged, OptionalRagged, OptionalText, Ragged


def present(entry: Entry) -> Entry:
    """The values that are there, as a complete column has them; other entries as they are."""
    if isinstance(entry, OptionalRagged):
        return entry.values
    return entry.lists() if isinstance(entry, OptionalText) else entry


def restored(made: Entry, entry: Entry) -> Entry:
    """What was made of the values that are there, in the rows of the entry that they are from."""
    if isinstance(entry, OptionalRagged):
        rows = as_offsets(entry)
    elif isinstance(entry, OptionalText):
        rows = entry.outer
    else:
        return made
    if isinstance(made, Tensor):
        if made.dim() == 1:
            return OptionalRagged(made, rows)
        return Ragged(made.reshape(-1), rows * made.shape[1])
    if isinstance(made, NestedRagged):
        return NestedRagged(made.values, made.inner, made.outer[rows])
    if is_text(made):
        return OptionalText(made.values, as_offsets(made), rows)
    kind = OptionalRagged if isinstance(made, OptionalRagged) else Ragged
    return kind(made.values, as_offsets(made)[rows], made.weights)


def without_nan(made: Sequence[Entry], entries: Sequence[Entry]) -> list[Entry]:
    """What was made of each value of the entries, without what was made of NaN."""
    result = list(made)
    places = [i for i, entry in enumerate(entries) if values_of(entry).is_floating_point()]
    if not places:
        return result
    # One pass over the values, and one wait for a GPU. Infinities may add up to NaN, too.
    sums = torch.stack([values_of(entries[i]).detach().sum().to(torch.float32) for i in places])
    for i, suspect in zip(places, sums.isnan().tolist(), strict=True):
        if suspect:
            result[i] = _without(result[i], values_of(entries[i]).isnan())
    return result


def _without(made: Entry, gone: Tensor) -> Entry:
    if not bool(gone.any()):
        return made
    if isinstance(made, NestedRagged):
        lists = keep(made.lists(), ~gone)
        return NestedRagged(lists.values, as_offsets(lists), made.outer)
    if isinstance(made, Ragged):
        return keep(made, ~gone)
    if made.dim() == 1:
        return OptionalRagged(made[~gone], offsets_from((~gone).to(torch.int64)))
    raise ValueError(
        f"expected a number in each place of {describe(made)}, but received NaN, of which no id can be made; "
        'fill_missing(…) before it gives a number, and to_ragged(pad=float("nan")) makes lists without NaN.'
    )
