"""`Sections`: the layout of messages, by the number of keys of each rank and table.

A message of keys has for each rank its keys, table by table, and then their uses, of 4 bytes each. Vectors
and gradients are in the same order. A vector takes whole units of 16 bytes, so that kernels can address all
of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda.kernels import routing
from karvan.store.exchange.message_layout import words

UNIT = 4  # floats

_PART = routing.PART_FIELDS.value


def units_of(dim: int) -> int:
    """The units of a vector."""
    return -(-dim // UNIT)


class Sections:
    """Where the keys, vectors and gradients of each rank and table are."""

    def __init__(self, counts: NDArray[np.int64], dims: Sequence[int]) -> None:
        self.counts = counts  # of keys, by rank and slot
        self.dims = list(dims)
        self.units = np.array([units_of(dim) for dim in dims], np.int64)
        self.keys = int(counts.sum())
        self.keys_of = [int(count) for count in counts.sum(1)]  # by rank
        self.words_of = [words(count) for count in self.keys_of]
        self.floats_of = [int(count) for count in (counts * self.units).sum(1) * UNIT]
        self.floats = sum(self.floats_of)

    def parts(self, front: int) -> NDArray[np.int64]:
        """What kernels read of each part; vectors begin after `front` units."""
        flat = self.counts.reshape(-1)
        number = np.cumsum(flat) - flat  # of its first key
        units = np.tile(self.units, len(self.counts))
        taken = flat * units
        word = np.repeat(np.cumsum(self.words_of) - self.words_of, len(self.dims))
        first_of_rank = np.repeat(np.cumsum(self.keys_of) - self.keys_of, len(self.dims))
        of_rank = np.repeat(np.array(self.keys_of, np.int64), len(self.dims))
        made = np.empty((len(flat), _PART), np.int64)
        made[:, routing.FIRST.value] = front + np.cumsum(taken) - taken - number * units
        made[:, routing.UNITS.value] = units
        made[:, routing.WORD.value] = word - first_of_rank
        made[:, routing.USE.value] = 2 * (word + of_rank) - first_of_rank
        return made

    def split_keys(self, message: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The keys and the uses of each part."""
        keys: list[Tensor] = []
        uses: list[Tensor] = []
        for piece, of_rank, total in zip(
            torch.split(message, self.words_of), self.counts.tolist(), self.keys_of, strict=True
        ):
            keys += torch.split(piece[:total], of_rank)
            uses += torch.split(piece[total:].view(torch.int32)[:total], of_rank)
        return keys, uses

    def split_values(self, values: Tensor) -> list[Tensor]:
        """The values of each part, of which there is one for each key."""
        return list(torch.split(values, self.counts.reshape(-1).tolist()))

    def split_vectors(self, floats: Tensor) -> list[Tensor]:
        """The vectors or gradients of each part, (keys, dim); their rows are whole units apart."""
        counts, units = self.counts.reshape(-1), np.tile(self.units, len(self.counts))
        pieces = torch.split(floats, (counts * units * UNIT).tolist())
        dims = self.dims * len(self.counts)
        return [
            piece.view(-1, UNIT * int(unit))[:, :dim]
            for piece, unit, dim in zip(pieces, units, dims, strict=True)
        ]
