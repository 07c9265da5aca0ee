"""`embedding_config.yml`: the slots of a job, each a feature of ids, as tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from karvan.compat.persia.bridge.foreign_settings import Foreign, chosen_file, read_once, settings_of
from karvan.compat.persia.embedding import EmbeddingConfig
from karvan.distributed.wire_store import WireStore
from karvan.embedding import Table
from karvan.embedding.init import Uniform
from karvan.embedding.table import HashStack
from karvan.job.environment import JobEnvironment
from karvan.presets import persia
from karvan.settings.schema import Count, CountOrZero, SettingsError
from karvan.settings.yaml_text import parse
from karvan.wire import Security

VARIABLE = "PERSIA_EMBEDDING_CONFIG"
_PUBLISHED = "persia/embedding_config.yml"  # a key at the registry
_ANSWER_WITHIN = 60.0  # seconds


class HashStackConfig(Foreign):
    """Ids become rows of a table of a fixed size, in some rounds; 0 rounds are none."""

    hash_stack_rounds: CountOrZero = 0
    embedding_size: CountOrZero = 0


class SlotConfig(Foreign):
    """A feature of ids."""

    unused: ClassVar = {
        "index_prefix": "it is the upper bits of the slot's ids; a slot has its own table, or shares the "
        "table of its group.",
        "capacity": "it is how many rows the slot has; capacity in embedding_parameter_server_config of "
        "global_config.yml limits the rows of all slots of a server.",
        "is_pid": "it marks a slot; all slots are alike.",
        "is_uid": "it marks a slot; all slots are alike.",
    }
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


class Slots(Foreign):
    """The slots by name. Slots of one group of `feature_groups` share rows; all others have their own.

    feature_index_prefix_bit: how many bits of an id PERSIA takes for the group. Here groups are tables of
    their own, and ids keep all of their 64 bits.
    """

    older: ClassVar = {"slot_configs": "slots_config", "slot_config": "slots_config"}
    unused: ClassVar = {
        "forward_buffer_size": "it is a queue of embedding workers; global_config.yml sets its length.",
        "target_config": "it makes labels of features; a batch has its labels.",
    }
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
            if group in self.slots_config and owners.get(group) != group:
                raise ValueError(
                    f"feature_groups has a group with the name of a slot that is not in it, '{group}'"
                )
        return self

    def tables(self, config: EmbeddingConfig) -> dict[str, Table]:
        """A table for each slot."""
        groups = {slot: group for group, slots in self.feature_groups.items() for slot in slots}
        return {name: slot.table(groups.get(name, name), config) for name, slot in self.slots_config.items()}


def read_slots(path: str | os.PathLike[str] | None = None) -> Slots:
    """The slots of a file; without one, of that of PERSIA_EMBEDDING_CONFIG, or of what is published."""
    chosen = path or os.environ.get(VARIABLE)
    if chosen:
        return read_once(Slots, chosen_file(chosen, "embedding_config.yml"))
    with _job_store() as store:
        if store is not None and store.check([_PUBLISHED]):
            return _parsed(store.get(_PUBLISHED))
    raise SettingsError(
        f"Expected the path of embedding_config.yml in the environment variable {VARIABLE}, or a job that "
        "gives it to its embedding worker: persia-launcher embedding-worker --embedding-config PATH, got "
        "neither."
    )


def publish_slots(path: str | os.PathLike[str]) -> None:
    """Give the content of a file to the trainers of the job, by its registry: they need not have the file."""
    with _job_store() as store:
        if store is not None:
            store.set(_PUBLISHED, Path(path).read_bytes())


@contextmanager
def _job_store() -> Iterator[WireStore | None]:
    """The keys at the registry of the job; None without one."""
    job = JobEnvironment.read()
    if not job.registry:
        yield None
        return
    with closing(WireStore(job.master, job.generation, Security.from_environment(), _ANSWER_WITHIN)) as store:
        yield store


@cache
def _parsed(content: bytes) -> Slots:
    made: Slots = settings_of(Slots, parse(content.decode()), "embedding_config.yml of the embedding worker")
    return made
