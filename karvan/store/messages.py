"""What ranks, servers and workers send each other: owners of keys, the layout of ids, vectors, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.distributed.connection import WIRES
from karvan.native import _native
from karvan.store.types import RULE_NUMBERS, Counts, Keys, Rule, TableSpec, Vectors

# Which rank owns a key: the one whose range of hashes contains the key's hash.


Hashes: TypeAlias = NDArray[np.uint64]


def hashes_of(keys: Keys) -> Hashes:
    """The hashes of csrc/hash/mix.h, whose ranges divide keys between ranks and between files."""
    hashes = np.empty(len(keys), np.uint64)
    _native.mix(np.ascontiguousarray(keys), hashes)
    return hashes


def owners_of(hashes: Hashes, ranks: int) -> NDArray[np.int64]:
    """The rank that owns each hash, as csrc/batch/key_routing.h computes it."""
    half = np.uint64(32)
    return (((hashes >> half) * np.uint64(ranks)) >> half).astype(np.int64)


def first_hash_of(rank: int, ranks: int) -> int:
    """The smallest hash that a rank owns; for `ranks` itself, 2^64."""
    return -(-(rank << 32) // ranks) << 32


def counters_of(first: int, end: int, counters: int) -> slice:
    """The slice of an admission filter's counters that belongs to a range of hashes.

    counters: the filter's size; see csrc/table/admission_filter.h. The range has the hashes whose upper 32
    bits are at least `first` and below `end`.
    """
    blocks = counters // 64
    last = ((end << 32) - 1) * blocks >> 64
    return slice((first * blocks >> 32) * 64, (last + 1) * 64)


# The layout of keys, vectors and gradients of all tables in one array per owner or caller.
#
# They are ordered by slot (a table's index), then by the index that a key has in the caller's plan.


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


def message_of(keys: Keys, uses: Counts | int) -> Keys:
    """A message of these keys, and of how often each is used."""
    message = np.zeros(words(len(keys)), np.int64)
    message[: len(keys)] = keys
    message[len(keys) :].view(np.uint32)[: len(keys)] = uses
    return message


def cut(message: Tensor, sizes: Sequence[int]) -> list[Keys]:
    """The pieces of a message: consecutive, of these sizes."""
    return np.split(message.numpy(), np.cumsum(sizes)[:-1])


def floats(keys: Numbers, dims: Sequence[int]) -> list[int]:
    """Floats to or from each rank."""
    return [sum(n * dim for n, dim in zip(of_rank, dims, strict=True)) for of_rank in keys]


def keys_of(messages: Sequence[Keys], counts: Numbers) -> list[list[Keys]]:
    """The keys of messages, by rank and slot."""
    arrays = []
    for message, of_rank in zip(messages, counts, strict=True):
        ends = np.cumsum(of_rank)
        arrays.append(np.split(message[: int(ends[-1])], ends[:-1]))
    return arrays


def starts_of(counts: Sequence[int], dims: Sequence[int], begin: int = 0) -> list[Positions]:
    """The positions where the vectors of a rank's keys start, by slot."""
    arrays, at = [], begin
    for count, dim in zip(counts, dims, strict=True):
        arrays.append(at + np.arange(count, dtype=np.int64) * dim)
        at += count * dim
    return arrays


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
            arrays = _native.FeatureArrays(values=keys, cells=count, samples=count, out=out, uses=uses)
            inputs.append(arrays)
            keys += 8 * count
            uses += 4 * count
            out += 4 * count * dim
    return inputs


# Messages between a remote store and its servers: tables and rules in JSON, vectors as bytes.


def spec_to_json(spec: TableSpec) -> dict[str, Any]:
    """A table, as `spec_from_json` reads it."""
    return asdict(spec)


def spec_from_json(spec: Mapping[str, Any]) -> TableSpec:
    """The table that `spec_to_json` has written."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in spec.items()
    }
    return TableSpec(**fields)


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """A rule, as `rule_from_json` reads it."""
    numbers = {name: float(getattr(rule, name)) for name in RULE_NUMBERS}
    return {"kind": rule.kind, **numbers, "accumulate_last": rule.accumulate_last}


def rule_from_json(fields: Mapping[str, Any]) -> Rule:
    """The rule that `rule_to_json` has written; anything else is an error now, before a row changes."""
    rule = Rule(fields["kind"], **{name: fields[name] for name in RULE_NUMBERS})
    rule.native()
    return rule


def to_wire(floats: Tensor, wire: str) -> NDArray[Any]:
    """Floats as they are sent; two-byte numbers are sent as uint16."""
    if wire == "float32":
        return floats.numpy()
    return floats.to(WIRES[wire]).view(torch.int16).numpy().view(np.uint16)


def from_wire(array: NDArray[Any], wire: str) -> Vectors:
    """The floats that were sent; read-only."""
    if wire == "float32":
        return array
    bits = torch.from_numpy(array.copy().view(np.int16))
    return bits.view(WIRES[wire]).float().numpy()


# Gradients that lack some of the keys that were looked up, which is rare.
#
# They are sent in the same order and number as complete ones, with NaN as the first float where a key has no
# gradient. This cannot be mistaken: a table with gradients that are not finite is not updated.


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
        positions = order[np.searchsorted(keys[slot], some, sorter=order)]
        flat[starts[slot][positions][:, None] + np.arange(dim)] = values * np.float32(scale)


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
    sums: list[tuple[Keys, Vectors]] = []
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
        sums.append((unique, total))
    return sums
