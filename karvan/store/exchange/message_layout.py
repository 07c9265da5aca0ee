"""The layout of keys, vectors and gradients of all tables in one array per owner or caller.

They are ordered by slot (a table's index), then by the index that a key has in the caller's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from karvan.native import _native
from karvan.store.types import Keys

Numbers: TypeAlias = list[list[int]]  # of keys, by rank and slot
Positions: TypeAlias = NDArray[np.int64]


class Routed(NamedTuple):
    """A batch whose keys have been sent to their owners."""

    plan: _native.Plan
    route: _native.Route
    requested: Numbers  # keys that this rank requests
    asked: Numbers  # keys that others request from it
    sent: list[Keys]  # the messages with `requested`
    received: list[Keys]  # the messages with `asked`


def words(keys: int) -> int:
    """How many 64-bit numbers a message with so many keys and their 32-bit numbers of uses has."""
    return keys + (keys + 1) // 2


def cut(message: Tensor, sizes: Sequence[int]) -> list[Keys]:
    """The pieces of a message: consecutive, of these sizes."""
    return np.split(message.numpy(), np.cumsum(sizes)[:-1])


def floats(keys: Numbers, dims: Sequence[int]) -> list[int]:
    """Floats to or from each rank."""
    return [sum(n * dim for n, dim in zip(of_rank, dims, strict=True)) for of_rank in keys]


def keys_of(messages: Sequence[Keys], counts: Numbers) -> list[list[Keys]]:
    """The keys of messages, by rank and slot."""
    made = []
    for message, of_rank in zip(messages, counts, strict=True):
        ends = np.cumsum(of_rank)
        made.append(np.split(message[: int(ends[-1])], ends[:-1]))
    return made


def starts_of(counts: Sequence[int], dims: Sequence[int], begin: int = 0) -> list[Positions]:
    """The positions where the vectors of a rank's keys start, by slot."""
    made, at = [], begin
    for count, dim in zip(counts, dims, strict=True):
        made.append(at + np.arange(count, dtype=np.int64) * dim)
        at += count * dim
    return made


def by_slot(arrays: Sequence[Sequence[Positions]]) -> list[Positions]:
    """The arrays of all ranks for each slot, concatenated."""
    return [np.concatenate(of_slot) for of_slot in zip(*arrays, strict=True)]


def features(
    asked: Numbers, messages: Sequence[Keys], dims: Sequence[int], out: int
) -> list[_native.FeatureArrays]:
    """The requested keys as features of the native core: one for each rank and each of its tables.

    out: the address of as many floats as were requested.
    """
    inputs = []
    for of_rank, message in zip(asked, messages, strict=True):
        keys = message.ctypes.data
        uses = keys + 8 * sum(of_rank)
        for count, dim in zip(of_rank, dims, strict=True):
            made = _native.FeatureArrays(values=keys, cells=count, samples=count, out=out, uses=uses)
            inputs.append(made)
            keys += 8 * count
            uses += 4 * count
            out += 4 * count * dim
    return inputs
