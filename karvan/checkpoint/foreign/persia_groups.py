"""`embedding_config.yml` of PERSIA: which table an id in a checkpoint belongs to, and its id there.

PERSIA has one space of ids for all features. An id is taken modulo 2^(64 - bits) - 1, and the number of its
feature group, counted from 1, is put into its upper `feature_index_prefix_bit` bits. Groups are numbered in
the order of `feature_groups`, then come the slots without a group, each a group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from karvan.settings.schema import SettingsError, read_tree

_SLOTS = ("slots_config", "slot_configs", "slot_config")  # by the age of the file


@dataclass(frozen=True)
class Groups:
    """The groups in the order of their numbers, each with the dim of its rows."""

    path: Path
    bits: int
    dims: dict[str, int]

    @property
    def names(self) -> list[str]:
        """Their names."""
        return list(self.dims)

    def numbers_of(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The index of each id's group; below 0 or too large if it belongs to none."""
        return (ids >> np.uint64(64 - self.bits)).astype(np.int64) - 1

    def keys_of(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The ids without their groups."""
        return (ids & np.uint64((1 << (64 - self.bits)) - 1)).view(np.int64)


def read_groups(path: Path) -> Groups:
    """The groups of an embedding configuration; a SettingsError says what is wrong with it."""
    if not path.is_file():
        raise SettingsError(f"Expected PERSIA's embedding_config.yml at {path}, which does not exist.")
    content = read_tree(path)
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must be a mapping with slots_config, got {content!r}.")
    slots = next((content[name] for name in _SLOTS if name in content), None)
    if not isinstance(slots, dict) or not slots:
        raise SettingsError(f"{path}: expected slots_config with slots, got {slots!r}.")
    bits = content.get("feature_index_prefix_bit", 8)
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 63:
        raise SettingsError(f"{path}: expected feature_index_prefix_bit from 1 to 63, got {bits!r}.")
    groups = content.get("feature_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(each, list) for each in groups.values()):
        raise SettingsError(f"{path}: expected feature_groups as lists of slots by group, got {groups!r}.")
    members = {str(group): [str(slot) for slot in each] for group, each in groups.items() if each}
    grouped = {slot for each in members.values() for slot in each}
    for slot in slots:
        if str(slot) not in grouped:
            if str(slot) in members:
                raise SettingsError(f"{path}: '{slot}' is both a slot and a feature group.")
            members[str(slot)] = [str(slot)]
    if len(members) >= 1 << bits:
        raise SettingsError(
            f"{path} has {len(members)} feature groups, but feature_index_prefix_bit {bits} tells only "
            f"{(1 << bits) - 1} apart: PERSIA has mixed their ids."
        )
    known = {str(slot): entry for slot, entry in slots.items()}
    return Groups(path, bits, {group: _dim(path, known, group, each) for group, each in members.items()})


def _dim(path: Path, slots: dict[str, Any], group: str, members: list[str]) -> int:
    dims = set()
    for slot in members:
        entry = slots.get(slot)
        dim = entry.get("dim") if isinstance(entry, dict) else None
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise SettingsError(f"{path}: expected slot '{slot}' with a dim of at least 1, got {entry!r}.")
        dims.add(dim)
    if len(dims) > 1:
        raise SettingsError(f"{path}: the slots of group '{group}' share rows, but have dims {sorted(dims)}.")
    return int(dims.pop())
