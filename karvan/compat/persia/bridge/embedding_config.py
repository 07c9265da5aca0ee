"""`embedding_config.yml`: the slots of a job, each a feature of ids, as tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from karvan.compat.persia.embedding import EmbeddingConfig
from karvan.embedding import Table
from karvan.embedding.init import Uniform
from karvan.embedding.table import HashStack
from karvan.presets import persia
from karvan.settings.schema import Count, CountOrZero, Section, checked_settings, read_tree

VARIABLE = "PERSIA_EMBEDDING_CONFIG"
_OLDER = {"slot_configs": "slots_config"}


class HashStackConfig(Section):
    """Ids become rows of a table of a fixed size, in some rounds; 0 rounds are none."""

    hash_stack_rounds: CountOrZero = 0
    embedding_size: CountOrZero = 0


class SlotConfig(Section):
    """A feature of ids."""

    dim: Count
    sample_fixed_size: Count = 10
    embedding_summation: bool = True
    sqrt_scaling: bool = False
    hash_stack_config: HashStackConfig = Field(default_factory=HashStackConfig)

    @model_validator(mode="after")
    def _check(self) -> SlotConfig:
        if self.sqrt_scaling and not self.embedding_summation:
            raise ValueError("sqrt_scaling scales a sum, so it expects embedding_summation: true")
        return self

    def table(self, name: str, config: EmbeddingConfig) -> Table:
        """Its table; slots of one group share the one of that name."""
        stack = self.hash_stack_config
        raw = not self.embedding_summation
        return persia.table(
            self.dim,
            name,
            admit_probability=config.admit_probability,
            combiner="sequence" if raw else "sqrtn" if self.sqrt_scaling else "sum",
            length=self.sample_fixed_size if raw else None,
            init=Uniform(*config.emb_initialization),
            hash_stack=HashStack(stack.hash_stack_rounds, stack.embedding_size)
            if stack.hash_stack_rounds
            else None,
        )


class Slots(Section):
    """The slots by name. Slots of one group of `feature_groups` share rows; all others have their own.

    feature_index_prefix_bit: how many bits of an id PERSIA takes for the group. Here groups are tables of
    their own, and ids keep all of their 64 bits.
    """

    slots_config: dict[str, SlotConfig]
    feature_index_prefix_bit: Annotated[Count, Field(le=63)] = 8
    feature_groups: dict[str, list[str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_groups(self) -> Slots:
        if not self.slots_config:
            raise ValueError("slots_config expects at least one slot")
        owners: dict[str, str] = {}
        for group, slots in self.feature_groups.items():
            for slot in slots:
                if slot not in self.slots_config:
                    raise ValueError(f"feature_groups names the slot '{slot}', which slots_config lacks")
                if slot in owners:
                    raise ValueError(f"slot '{slot}' is in two groups, '{owners[slot]}' and '{group}'")
                owners[slot] = group
        return self

    def tables(self, config: EmbeddingConfig) -> dict[str, Table]:
        """A table for each slot."""
        groups = {slot: group for group, slots in self.feature_groups.items() for slot in slots}
        return {name: slot.table(groups.get(name, name), config) for name, slot in self.slots_config.items()}


def read_slots(path: str | os.PathLike[str] | None = None) -> Slots:
    """The slots of a file; without one, of that which PERSIA_EMBEDDING_CONFIG names."""
    chosen = path or os.environ.get(VARIABLE)
    if not chosen:
        raise ValueError(
            f"Expected the path of embedding_config.yml in the environment variable {VARIABLE}, got none."
        )
    if not Path(chosen).is_file():
        raise FileNotFoundError(f"Expected embedding_config.yml at {chosen}, which does not exist.")
    return slots_of(read_tree(Path(chosen)), str(chosen))


def slots_of(content: Any, where: str = "The embedding configuration") -> Slots:
    """The slots of a configuration that is a mapping already; `where` begins its errors."""
    if isinstance(content, Mapping):
        content = {_OLDER.get(key, key): value for key, value in content.items()}
    return checked_settings(Slots, content, where)
