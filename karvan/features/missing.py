"""Steps on columns with missing values: they run on the values that are there.

A column that lacks some values (`OptionalRagged`, `OptionalText`) must give the rows that it would give if
the batch had been cut differently. So steps see what they see of a complete column: a tensor, or one string
for each row. What they make is then put back into the rows that have a value.
"""

from __future__ import annotations

from torch import Tensor

from karvan.features.layout import is_text
from karvan.ragged import Entry, NestedRagged, OptionalRagged, OptionalText, Ragged
from karvan.rows import as_offsets


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
    return Ragged(made.values, as_offsets(made)[rows], made.weights)
