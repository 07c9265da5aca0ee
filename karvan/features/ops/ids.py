"""Transforms of ids: remainders, prefixes, several ids for one."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from karvan import ids
from karvan.features.ops.base import (
    ChainStep,
    ElementOp,
    Number,
    Op,
    describe,
    describe_for_ids,
    expect_ids,
    expect_text,
    is_text,
    strings_of,
    with_values,
)
from karvan.ragged import Entry, NestedRagged, Ragged, as_offsets, join_rows, values_of

SIGN = 1 << 63


class IdOp(ElementOp):
    """An element op on ids."""

    def check(self, *entries: Entry) -> None:
        """Ids are int64."""
        expect_ids(*entries)

    def settings(self) -> Hashable:
        """All settings of id ops are parameters."""
        return None


@dataclass(frozen=True)
class Mod(IdOp):
    """The remainder of ids read as unsigned."""

    modulus: int
    name: ClassVar[str] = "mod"

    def __post_init__(self) -> None:
        if not 1 <= self.modulus < SIGN:
            raise ValueError(f"mod expects a modulus from 1 to 2**63 - 1, but received {self.modulus}.")

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """The modulus."""
        return (self.modulus,)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """As `karvan.ids.mod`, with moduli that may differ."""
        return ids.mod(values, parameters[0])


@dataclass(frozen=True)
class DropSign(IdOp):
    """Ids without their sign bit, as RecIS's bucket 0."""

    name: ClassVar[str] = "hash"

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """The lower 63 bits."""
        return values & (SIGN - 1)


@dataclass(frozen=True)
class Prefix(IdOp):
    """Ids with the feature group in their upper bits; see `karvan.ids.prefix`."""

    group: int
    bits: int
    name: ClassVar[str] = "prefix"

    def __post_init__(self) -> None:
        ids.prefix(torch.zeros(0, dtype=torch.int64), self.group, self.bits)

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """The modulus of the lower bits, and the upper bits."""
        upper = (self.group + 1) << (64 - self.bits)
        return ((1 << (64 - self.bits)) - 1, upper - (1 << 64) if upper >> 63 else upper)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """As `karvan.ids.prefix`, with groups that may differ."""
        low, upper = parameters
        return ids.mod(values, low) + upper


@dataclass(frozen=True)
class MultiHash(ChainStep):
    """Each id as several small ids, each for a separate table (RecIS `IDMultiHash`)."""

    buckets: tuple[int, ...]
    name: ClassVar[str] = "multi_hash"

    def __post_init__(self) -> None:
        if not 1 <= len(self.buckets) <= 4 or not all(1 <= bucket < 1 << 32 for bucket in self.buckets):
            raise ValueError(
                "multi_hash expects from 1 to 4 bucket counts, each from 1 to 2**32 - 1, "
                f"but received {list(self.buckets)}."
            )

    def parts(self) -> Sequence[Op]:
        """One hash for each bucket count."""
        settings = zip((1, 3, 5, 7), (29, 47, 67, 83), self.buckets, strict=False)
        return [_Residue(factor, _prime_to(scale * bucket), bucket) for factor, scale, bucket in settings]


@dataclass(frozen=True)
class _Residue(IdOp):
    """(x * factor) mod prime mod bucket, the product in wrapping 64 bits."""

    factor: int
    prime: int
    bucket: int
    name: ClassVar[str] = "multi_hash"

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """All three."""
        return (self.factor, self.prime, self.bucket)

    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """torch's remainder takes the sign of the divisor, so it is never negative."""
        factor, prime, bucket = parameters
        return values * factor % prime % bucket


@dataclass(frozen=True)
class HashStack(Op):
    """Each id as `rounds` ids of one table, in the same row; see `karvan.ids.hash_stack`."""

    rounds: int
    size: int
    name: ClassVar[str] = "hash_stack"

    def __post_init__(self) -> None:
        ids.check_hash_stack(self.rounds, self.size)

    def check(self, *entries: Entry) -> None:
        """Ids, one or several a row."""
        expect_ids(*entries)
        if values_of(entries[0]).dim() > (2 if isinstance(entries[0], Tensor) else 1):
            raise ValueError(f"expected ids of 1 or 2 dimensions, but received {describe(entries[0])}.")

    def fuse_key(self, *entries: Entry) -> Hashable:
        """Equal settings on one device."""
        return (self, values_of(entries[0]).device)

    @classmethod
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """One hash of all ids; every length becomes `rounds` times what it was."""
        op = ops[0]
        flat = [values_of(entry).reshape(-1) for (entry,) in arguments]
        hashes = ids.hash_stack(torch.cat(flat), op.rounds, op.size)
        parts = torch.split(hashes, [part.shape[0] for part in flat])
        return [
            _stacked(entry, part.reshape(-1), op.rounds)
            for (entry,), part in zip(arguments, parts, strict=True)
        ]


def _stacked(entry: Entry, values: Tensor, rounds: int) -> Entry:
    if isinstance(entry, Tensor):
        columns = rounds if entry.dim() == 1 else rounds * int(entry.shape[1])
        return values.reshape(entry.shape[0], columns)
    if isinstance(entry, NestedRagged):
        return NestedRagged(values, entry.inner * rounds, entry.outer)
    weights = None if entry.weights is None else entry.weights.repeat_interleave(rounds)
    return Ragged(values, as_offsets(entry) * rounds, weights)


@functools.lru_cache(maxsize=1024)
def _prime_to(limit: int) -> int:
    """The largest prime up to the limit."""
    return next(n for n in range(limit, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1)))


# Transforms from strings to ids: hashes, and the base class of vocabularies.


class StringOp(Op):
    """A step that computes an id for each string (or each id): a row's strings become its ids."""

    takes_text: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Strings or ids."""
        if is_text(entries[0]):
            expect_text(entries[0])
        elif values_of(entries[0]).dtype != torch.int64:
            raise TypeError(
                f"expected strings or ids of torch.int64, but received {describe_for_ids(entries[0])}."
            )

    def fuse_key(self, *entries: Entry) -> Hashable:
        """Equal settings on one device, strings with strings."""
        return (self, is_text(entries[0]), values_of(entries[0]).device)

    @abstractmethod
    def compute(self, items: Ragged) -> Tensor:
        """An id for each item, which is a string or the eight bytes of an id."""

    @classmethod
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """All items in one Ragged of bytes."""
        op = ops[0]
        entries = [entry for (entry,) in arguments]
        items = [items_of(entry) for entry in entries]
        joined = join_rows([Ragged(item.values, as_offsets(item)) for item in items])
        assert isinstance(joined, Ragged)
        parts = torch.split(op.compute(joined), [item.rows for item in items])
        return [_per_item(entry, part) for entry, part in zip(entries, parts, strict=True)]


def items_of(entry: Entry) -> Ragged:
    """One row of bytes for each string, or for each id."""
    if not is_text(entry):
        flat = values_of(entry).reshape(-1)
        return Ragged(flat.view(torch.uint8), torch.arange(len(flat) + 1, device=flat.device) * 8)
    return strings_of(entry)


def _per_item(entry: Entry, item_ids: Tensor) -> Entry:
    if not is_text(entry):
        return with_values(entry, item_ids)
    return Ragged(item_ids, entry.outer) if isinstance(entry, NestedRagged) else item_ids


@dataclass(frozen=True)
class Hash(StringOp):
    """FarmHash or MurmurHash of strings, or of ids as eight little-endian bytes."""

    kind: str
    name: ClassVar[str] = "hash"

    def __post_init__(self) -> None:
        if self.kind not in ("farm", "murmur"):
            raise ValueError(f"hash expects 'farm' or 'murmur', but received '{self.kind}'.")

    def compute(self, items: Ragged) -> Tensor:
        """All 64 bits."""
        return ids.farm(items) if self.kind == "farm" else ids.murmur(items)
