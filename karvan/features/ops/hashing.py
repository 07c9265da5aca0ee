"""Transforms from strings to ids: hashes, and the base class of vocabularies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from karvan import ids
from karvan.features.ops.base import Op, expect_text
from karvan.features.ops.layout import describe_for_ids, is_text, with_values
from karvan.ragged import Entry, NestedRagged, Ragged, as_offsets, join_rows, values_of


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
    def run_group(cls, ops: Sequence[Op], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """All items in one Ragged of bytes."""
        op = ops[0]
        assert isinstance(op, StringOp)
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
    assert not isinstance(entry, Tensor)
    return entry.lists() if isinstance(entry, NestedRagged) else entry


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
