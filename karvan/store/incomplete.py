"""Gradients that lack some of the keys that were looked up, because a feature had none: rare, and in numpy.

They travel in the same order and number as complete ones, with a NaN in front where a key has no gradient. A
table with gradients that are not finite is left alone anyway.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from karvan import _native
from karvan.store.messages import Away, by_slot, keys_of, places_of
from karvan.store.protocol import Keys, Vectors


def pack(away: Away, mine: _native.Gradients, scale: float, sent: Tensor) -> None:
    """Write gradients times scale in the order of travel."""
    sent.fill_(torch.nan)
    keys = by_slot(keys_of(away.routed.sent, away.routed.wanted))
    places = by_slot(places_of(away.routed.wanted, away.dims))
    flat = sent.numpy()
    for slot, dim in enumerate(away.dims):
        some, values = mine.keys_and_values(slot)
        order = np.argsort(keys[slot])
        found = order[np.searchsorted(keys[slot], some, sorter=order)]
        flat[places[slot][found][:, None] + np.arange(dim)] = values * np.float32(scale)


def sums(away: Away, received: Tensor, begins: list[int], by_key: bool) -> dict[str, tuple[Keys, Vectors]]:
    """The sums of what ranks have sent, or the means over those that have a key, by table.

    begins: where each rank's gradients begin.
    """
    flat = received.numpy()
    keys = by_slot(keys_of(away.routed.message, away.routed.asked))
    places = by_slot(
        [
            [begin + place for place in places_of([of_rank], away.dims)[0]]
            for begin, of_rank in zip(begins, away.routed.asked, strict=True)
        ]
    )
    made: dict[str, tuple[Keys, Vectors]] = {}
    for slot, table in enumerate(away.tables):
        values = flat[places[slot][:, None] + np.arange(away.dims[slot])]
        there = ~np.isnan(values[:, 0])
        unique, inverse, count = np.unique(keys[slot][there], return_inverse=True, return_counts=True)
        total = np.zeros((len(unique), away.dims[slot]), np.float32)
        np.add.at(total, inverse.reshape(-1), values[there])  # in the order of ranks
        if by_key:
            total /= count[:, None].astype(np.float32)
        made[table] = unique, total
    return made
