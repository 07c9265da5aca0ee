"""The layout of entries, and operations along their samples.

Every transform works on each row separately, so one call over all rows of many features returns the same as
many calls. Nothing here changes its inputs; results may share memory with them.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from karvan import kernels
from karvan.ragged import Entry, NestedRagged, OptionalText, Ragged, as_offsets, offsets_from, values_of


def flat_values(entry: Entry) -> Tensor:
    """All values in one dimension."""
    values = values_of(entry)
    return values if values.dim() == 1 else values.reshape(-1)


def with_values(entry: Entry, values: Tensor) -> Entry:
    """The same rows and weights with other values."""
    shape = values_of(entry).shape
    if values.shape != shape:
        values = values.reshape(shape)
    if isinstance(entry, Ragged):
        return type(entry)(values, entry.offsets, entry.weights)
    if isinstance(entry, NestedRagged):
        return type(entry)(values, entry.inner, entry.outer)
    return values


def is_text(entry: Entry) -> bool:
    """Whether the entry holds strings: a Ragged of bytes is one a row, a NestedRagged a list of them."""
    return not isinstance(entry, Tensor) and entry.values.dtype == torch.uint8


def as_text(entry: Entry) -> Entry:
    """Strings of int8, as other systems have them, as those of uint8 that steps of strings take."""
    if isinstance(entry, Tensor) or entry.values.dtype != torch.int8:
        return entry
    return with_values(entry, entry.values.view(torch.uint8))


def describe(entry: Entry) -> str:
    """The entry as errors describe it."""
    if isinstance(entry, Tensor):
        return f"a Tensor of {entry.dtype} and shape {tuple(entry.shape)}"
    kind = type(entry).__name__
    if isinstance(entry, OptionalText):
        return 'strings with missing values (Raw(…, default="") makes them empty)'
    if is_text(entry):
        return f"a {kind} of bytes (strings)"
    weighted = " with weights" if isinstance(entry, Ragged) and entry.weights is not None else ""
    return f"a {kind} of {entry.values.dtype}{weighted}"


def describe_for_lists(entry: Entry) -> str:
    """The entry as errors of steps that need lists describe it, with how to make lists."""
    if isinstance(entry, Tensor) and entry.dim() == 1:
        return (
            f"{describe(entry)}, one value per sample. fill_missing(…) fills samples without a value, and "
            "to_ragged() before this step makes lists of at most one value"
        )
    return describe(entry)


def describe_for_ids(entry: Entry) -> str:
    """The entry as errors of steps that need ids describe it, with how floats become ids."""
    if not values_of(entry).is_floating_point():
        return describe(entry)
    return (
        f"{describe(entry)}; ids are floats where some are missing, as pandas writes them, or all are: read "
        "them with columns=[kv.data.Fixed(…, dtype=torch.int64), …]"
    )


def kind_of(entry: Entry) -> Hashable:
    """What two entries must have in common to be joined."""
    values = values_of(entry)
    common = (type(entry).__name__, values.dtype, values.device, tuple(values.shape[1:]))
    if isinstance(entry, Ragged):
        weights = None if entry.weights is None else entry.weights.dtype
        return (*common, weights, entry.offsets is None)
    return common


def check_rows(entry: Entry) -> None:
    """Refuse offsets that do not tile the values; reading along them would mix rows up silently.

    On a GPU wrong offsets stop the device instead, so that right ones do not wait for it.
    """
    if not isinstance(entry, Tensor) and kernels.on_gpu(entry.values):
        _check_on_gpu(entry)
    elif isinstance(entry, Ragged):
        if entry.offsets is not None and _broken(entry.offsets, entry.values.shape[0]):
            entry.validate()
    elif isinstance(entry, NestedRagged):
        if _broken(entry.inner, entry.values.shape[0]):
            entry.lists().validate()
        lists = entry.inner[1:]
        if _broken(entry.outer, lists.shape[0]):
            Ragged(lists, entry.outer).validate()


def _check_on_gpu(entry: Ragged | NestedRagged) -> None:
    from karvan.kernels.rows import check_offsets

    if isinstance(entry, NestedRagged):
        check_offsets(entry.inner, entry.values.shape[0], whole=True)
        check_offsets(entry.outer, entry.inner.shape[0] - 1, whole=True)
    elif entry.offsets is not None:
        check_offsets(entry.offsets, entry.values.shape[0], whole=True)


def _broken(offsets: Tensor, count: int) -> bool:
    return bool((offsets.diff() < 0).any() | (offsets[0] != 0) | (offsets[-1] != count))


def as_ragged(entry: Ragged | Tensor) -> Ragged:
    """A tensor's rows as a Ragged: one value a row of a 1-D tensor, all columns of a 2-D one."""
    if isinstance(entry, Ragged):
        return entry
    if entry.dim() == 1:
        return Ragged(entry)
    rows, columns = entry.shape[:2]
    return Ragged(entry.flatten(0, 1), torch.arange(rows + 1, device=entry.device) * columns)


def row_numbers(lengths: Tensor, total: int) -> Tensor:
    """The row number of each value."""
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    return torch.repeat_interleave(rows, lengths, output_size=total)


def take(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of the values of all slices, in order, and the offsets of the slices among them.

    On a GPU this waits for it: the size of the result depends on the lengths.
    """
    offsets = offsets_from(lengths)
    total = int(offsets[-1])
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return shift + torch.arange(total, device=starts.device), offsets


def keep(entry: Ragged, mask: Tensor) -> Ragged:
    """The values that the mask selects, in their rows."""
    offsets = as_offsets(entry)
    before = offsets_from(mask.to(torch.int64))
    weights = None if entry.weights is None else entry.weights[mask]
    return Ragged(entry.values[mask], before[offsets], weights)
