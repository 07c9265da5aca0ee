"""Gradients that lack some of the keys that were looked up, which is rare.

They are sent in the same order and number as complete ones, with NaN as the first float where a key has no
gradient. This cannot be mistaken: a table with gradients that are not finite is not updated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from karvan.native import _native
from karvan.store.exchange.message_layout import Numbers, by_slot, floats, keys_of, starts_of
from karvan.store.types import Keys, Vectors


def pack(
    sent: Sequence[Keys],
    requested: Numbers,
    dims: Sequence[int],
    mine: _native.Gradients,
    scale: float,
    out: Tensor,
) -> None:
    """Write gradients times scale in the order in which keys were sent."""
    out.fill_(torch.nan)
    keys = by_slot(keys_of(sent, requested))
    begins = np.cumsum([0, *floats(requested, dims)])
    starts = by_slot(
        [starts_of(of_rank, dims, int(at)) for of_rank, at in zip(requested, begins[:-1], strict=True)]
    )
    flat = out.numpy()
    for slot, dim in enumerate(dims):
        some, values = mine.keys_and_values(slot)
        order = np.argsort(keys[slot])
        found = order[np.searchsorted(keys[slot], some, sorter=order)]
        flat[starts[slot][found][:, None] + np.arange(dim)] = values * np.float32(scale)


def sums(
    received: Sequence[Keys],
    asked: Numbers,
    dims: Sequence[int],
    gradients: Sequence[Vectors],
    by_key: bool,
) -> list[tuple[Keys, Vectors]]:
    """The sums of the gradients that ranks have sent, or the means over the ranks that have a key, by slot.

    gradients: one array for each rank.
    """
    keys = by_slot(keys_of(received, asked))
    made: list[tuple[Keys, Vectors]] = []
    for slot, dim in enumerate(dims):
        values = np.concatenate(
            [
                flat[starts_of(of_rank, dims)[slot][:, None] + np.arange(dim)]
                for flat, of_rank in zip(gradients, asked, strict=True)
            ]
        )
        present = ~np.isnan(values[:, 0])
        unique, inverse, count = np.unique(keys[slot][present], return_inverse=True, return_counts=True)
        total = np.zeros((len(unique), dim), np.float32)
        np.add.at(total, inverse.reshape(-1), values[present])  # in the order of ranks
        if by_key:
            total /= count[:, None].astype(np.float32)
        made.append((unique, total))
    return made
