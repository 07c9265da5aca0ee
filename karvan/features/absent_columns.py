"""Columns that a batch lacks, for features with `missing="empty"`: as if no sample had a value.

Steps take columns of certain kinds: numbers, strings, lists. Which kind a batch lacks is not known, so the
first kind is taken that the whole chain of the feature accepts; those of one value per sample come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from karvan.batch_slicing import rows_of, values_of
from karvan.ragged import Entry, NestedRagged, OptionalRagged, OptionalText, Ragged

Kind = Callable[[Tensor], Entry]
"""Makes an entry without values of the offsets of its rows, which are all 0."""


def _values(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


KINDS: tuple[Kind, ...] = (
    lambda rows: OptionalRagged(_values(rows, torch.int64), rows),
    lambda rows: OptionalRagged(_values(rows, torch.float32), rows),
    lambda rows: Ragged(_values(rows, torch.int64), rows),
    lambda rows: Ragged(_values(rows, torch.float32), rows),
    lambda rows: Ragged(_values(rows, torch.int64), rows, _values(rows, torch.float32)),
    lambda rows: NestedRagged(_values(rows, torch.int64), rows[:1], rows),
    lambda rows: OptionalText(_values(rows, torch.uint8), rows[:1], rows),
    lambda rows: NestedRagged(_values(rows, torch.uint8), rows[:1], rows),
)
LISTS, TEXT = KINDS[2], KINDS[-2:]


def find_kind(accepts: Callable[[Entry], object], text: bool) -> Kind | None:
    """The first kind that a chain accepts: which raises no TypeError or ValueError; text: strings first."""
    for kind in (*TEXT, *KINDS) if text else KINDS:
        try:
            accepts(kind(torch.zeros(2, dtype=torch.int64)))
        except (TypeError, ValueError):
            continue
        return kind
    return None


def rows_like(batch: Mapping[str, Entry]) -> Tensor | None:
    """The offsets of rows without values, as many as the batch has; None for a batch without columns."""
    for entry in batch.values():
        if isinstance(entry, Ragged | NestedRagged) or (isinstance(entry, Tensor) and entry.dim()):
            return torch.zeros(rows_of(entry) + 1, dtype=torch.int64, device=values_of(entry).device)
    return None
