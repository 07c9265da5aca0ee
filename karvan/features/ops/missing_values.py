"""Steps on columns with missing values: they run on the present values.

The result for a sample of a column with missing values (`OptionalRagged`, `OptionalText`) must not depend on
the other samples of its batch. So steps get the same as for a complete column: a tensor, or one string for
each row. Their results are then put back into the rows that have a value.

In floats NaN is a missing value. Ids have no such value, so a step from floats to ids omits the ids of NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from karvan.batch_slicing import as_offsets, offsets_from, values_of
from karvan.features.ops.layout import describe, is_text, keep
from karvan.ragged import Entry, NestedRagged, OptionalRagged, OptionalText, Ragged


def present(entry: Entry) -> Entry:
    """The present values, in the form of a complete column; other entries as they are."""
    if isinstance(entry, OptionalRagged):
        return entry.values
    return entry.lists() if isinstance(entry, OptionalText) else entry


def restored(output: Entry, entry: Entry) -> Entry:
    """The result for the present values, in the rows of the entry that they are from."""
    if isinstance(entry, OptionalRagged):
        rows = as_offsets(entry)
    elif isinstance(entry, OptionalText):
        rows = entry.outer
    else:
        return output
    if isinstance(output, Tensor):
        if output.dim() == 1:
            return OptionalRagged(output, rows)
        return Ragged(output.reshape(-1), rows * output.shape[1])
    if isinstance(output, NestedRagged):
        return NestedRagged(output.values, output.inner, output.outer[rows])
    if is_text(output):
        return OptionalText(output.values, as_offsets(output), rows)
    kind = OptionalRagged if isinstance(output, OptionalRagged) else Ragged
    return kind(output.values, as_offsets(output)[rows], output.weights)


def without_nan(outputs: Sequence[Entry], entries: Sequence[Entry], certain: Sequence[bool]) -> list[Entry]:
    """The results for the values of the entries, without those for NaN; `certain`: which have none."""
    results = list(outputs)
    indices = [
        i for i, entry in enumerate(entries) if values_of(entry).is_floating_point() and not certain[i]
    ]
    if not indices:
        return results
    # One pass over the values, and one synchronization with a GPU. Sums of infinities may also be NaN.
    sums = torch.stack([values_of(entries[i]).detach().sum().to(torch.float32) for i in indices])
    for i, suspect in zip(indices, sums.isnan().tolist(), strict=True):
        if suspect:
            results[i] = _without(results[i], values_of(entries[i]).isnan())
    return results


def _without(output: Entry, missing: Tensor) -> Entry:
    if not bool(missing.any()):
        return output
    if isinstance(output, NestedRagged):
        lists = keep(output.lists(), ~missing)
        return NestedRagged(lists.values, as_offsets(lists), output.outer)
    if isinstance(output, Ragged):
        return keep(output, ~missing)
    if output.dim() == 1:
        return OptionalRagged(output[~missing], offsets_from((~missing).to(torch.int64)))
    raise ValueError(
        f"expected a number in each position of {describe(output)}, but received NaN, which has no id. "
        'Put fill_missing(…) before it to replace NaN by a number, or to_ragged(pad=float("nan")) to '
        "make lists without NaN."
    )
