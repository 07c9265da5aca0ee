"""The messages between ranks: how keys, vectors and gradients of all tables lie in one array for each rank.

By rank, then by slot (a table's place), then in the order in which a rank's plan counts its keys.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from karvan import _native
from karvan.store.owners import Keys
from karvan.store.protocol import Plan

Numbers: TypeAlias = list[list[int]]  # of keys, by rank and slot
Places: TypeAlias = NDArray[np.int64]


class Routed(NamedTuple):
    """A batch whose keys are with their owners."""

    plan: _native.Plan
    route: _native.Route
    wanted: Numbers  # keys that this rank asks for
    asked: Numbers  # keys that it is asked for
    sent: Tensor  # the message with the former
    message: Tensor  # … and with the latter


class Away(NamedTuple):
    """A batch after its lookup."""

    routed: Routed
    owner: Plan  # of the keys that were asked for
    dims: list[int]  # by slot
    tables: list[str]
    vectors: Tensor  # the owner's outputs, which its plan points to


def words(keys: int) -> int:
    """Numbers of 64 bits that so many keys and their 32-bit numbers of uses take."""
    return keys + (keys + 1) // 2


def floats(keys: Numbers, dims: list[int]) -> list[int]:
    """Floats to or from each rank."""
    return [sum(n * dim for n, dim in zip(of_rank, dims, strict=True)) for of_rank in keys]


def keys_of(message: Tensor, counts: Numbers) -> list[list[Keys]]:
    """The keys of a message, by rank and slot."""
    made: list[list[Keys]] = []
    content, at = message.numpy(), 0
    for of_rank in counts:
        ends = np.cumsum(of_rank)
        made.append(np.split(content[at : at + int(ends[-1])], ends[:-1]))
        at += words(int(ends[-1]))
    return made


def places_of(counts: Numbers, dims: list[int]) -> list[list[Places]]:
    """Where the vectors of keys begin in the order of travel, by rank and slot."""
    made, at = [], 0
    for of_rank in counts:
        row = []
        for count, dim in zip(of_rank, dims, strict=True):
            row.append(at + np.arange(count, dtype=np.int64) * dim)
            at += count * dim
        made.append(row)
    return made


def by_slot(arrays: list[list[Places]]) -> list[Places]:
    """What ranks have for a slot, one after the other."""
    return [np.concatenate(of_slot) for of_slot in zip(*arrays, strict=True)]


def features(routed: Routed, dims: list[int], vectors: Tensor) -> list[int]:
    """What was asked for, in the native core's numbers: for each rank, for each of its tables."""
    inputs: list[int] = []
    out, begin = vectors.data_ptr(), routed.message.data_ptr()
    for of_rank in routed.asked:
        keys, uses = begin, begin + 8 * sum(of_rank)
        for count, dim in zip(of_rank, dims, strict=True):
            inputs += [keys, count, 0, count, 0, 1, out, uses]
            keys += 8 * count
            uses += 4 * count
            out += 4 * count * dim
        begin += 8 * words(sum(of_rank))
    return inputs
