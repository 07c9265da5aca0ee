"""PERSIA's configurations: `embedding_config.yml`, `global_config.yml`, and options of its calls.

Files are read as PERSIA does: a key without a meaning is left out, with a warning. A file is parsed once in a
process, so that its warnings appear once. Keys and options that only tune PERSIA's own machinery, and keys
that nobody knows, cause a warning; those that would change results are errors.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import Field, model_validator

from karvan.compat.unsupported import UnsupportedError
from karvan.distributed.wire_store import WireStore
from karvan.embedding import Table
from karvan.embedding.init import Uniform
from karvan.embedding.table import HashStack
from karvan.job.environment import JobEnvironment, set_variables
from karvan.job.roles import Role
from karvan.launch.job_spec import JobSpec
from karvan.presets import persia
from karvan.settings import (
    Count,
    CountOrZero,
    Positive,
    Section,
    SettingsError,
    checked_settings,
    parse,
    read_tree,
)
from karvan.wire import Security


def warn_of_tuning(here: str, **options: tuple[Any, Any]) -> None:
    """Warn of options that were set and that Karvan does not need: they change how fast PERSIA is.

    here: what Karvan does instead. options: the value of each, and its default.
    """
    for name, (given, default) in options.items():
        if given != default:
            warnings.warn(f"{name}={given!r} of PERSIA has no effect here: {here}", stacklevel=3)


def unsupported(what: str, instead: str) -> UnsupportedError:
    """The error for something that Karvan's adapter does not have."""
    return UnsupportedError(f"{what} of PERSIA", instead)


_UNKNOWN = "it is no key of PERSIA, which passes over it, too."


class Foreign(Section):
    """A section of a configuration of PERSIA.

    older: names of keys in earlier versions, and what they are called now. unused: keys without a
    counterpart: what they are for in PERSIA, and what Karvan does.
    """

    older: ClassVar[Mapping[str, str]] = {}
    unused: ClassVar[Mapping[str, str]] = {}

    def check(self) -> None:
        """Raise for values that are unsupported, and warn of those that have no effect."""


Settings = TypeVar("Settings", bound=Foreign)


def read_once(kind: type[Settings], path: str | os.PathLike[str], name: str) -> Settings:
    """The settings of a file, which has to exist; name: what PERSIA calls it.

    The same text is parsed once in a process.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"Expected {name} at {path}, which does not exist.")
    settings: Settings = _read(kind, Path(path), Path(path).read_bytes())
    return settings


@cache
def _read(kind: type[Settings], path: Path, content: bytes) -> Settings:
    tree = read_tree(path)
    return settings_of(kind, {} if tree is None else tree, str(path))


def settings_of(kind: type[Settings], tree: Any, where: str) -> Settings:
    """The settings of a tree, with one warning for each key that is left out; `where` begins all texts."""
    ignored: dict[str, str] = {}
    settings = checked_settings(kind, _chosen(kind, tree, where, "", ignored), where)
    settings.check()
    for key, reason in ignored.items():
        warnings.warn(f"{where}: {key} of PERSIA has no effect here: {reason}", stacklevel=4)
    return settings


def _chosen(kind: Any, tree: Any, where: str, path: str, ignored: dict[str, str]) -> Any:
    """A tree with the keys that a section has, by their names of now; the others are noted in `ignored`."""
    if not isinstance(tree, Mapping):
        return tree
    parts = get_args(kind)
    if get_origin(kind) is dict and issubclass(parts[1], Foreign):
        return {key: _chosen(parts[1], item, where, f"{path}*.", ignored) for key, item in tree.items()}
    if not isinstance(kind, type) or not issubclass(kind, Foreign):
        return tree
    chosen: dict[str, Any] = {}
    for key, value in tree.items():
        name = kind.older.get(key, key)
        if name not in kind.model_fields:
            ignored.setdefault(f"{path}{key}", kind.unused.get(key, _UNKNOWN))
            continue
        if name in chosen:
            raise SettingsError(f"{where}: {path}{key} is an older name of {name}, got both.")
        if value is not None:  # a key without a value has its default
            below = kind.model_fields[name].annotation
            chosen[name] = _chosen(below, value, where, f"{path}{name}.", ignored)
    return chosen


@dataclass
class EmbeddingConfig:
    """New rows are uniform within emb_initialization; values stay within ±weight_bound, if it is above 0.

    admit_probability: with which probability an unknown id gets a row, each time it occurs.
    """

    emb_initialization: tuple[float, float] = persia.INITIAL_RANGE
    admit_probability: float = 1.0
    weight_bound: float = persia.WEIGHT_BOUND

    @property
    def bound(self) -> float | None:
        """The bound of values; None without one."""
        return self.weight_bound if self.weight_bound > 0 else None


def get_default_embedding_config() -> EmbeddingConfig:
    """The defaults."""
    return EmbeddingConfig()


EMBEDDING_CONFIG = "PERSIA_EMBEDDING_CONFIG"
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
    chosen = path or os.environ.get(EMBEDDING_CONFIG)
    if chosen:
        return read_once(Slots, chosen, "embedding_config.yml")
    with _job_store() as store:
        if store is not None and store.check([_PUBLISHED]):
            return _parsed(store.get(_PUBLISHED))
    raise SettingsError(
        f"Expected the path of embedding_config.yml in the environment variable {EMBEDDING_CONFIG}, or a job "
        "that gives it to its embedding worker: persia-launcher embedding-worker --embedding-config PATH, "
        "got neither."
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
    slots: Slots = settings_of(Slots, parse(content.decode()), "embedding_config.yml of the embedding worker")
    return slots


GLOBAL_CONFIG = "PERSIA_GLOBAL_CONFIG"
_BUFFER = 1_000_000
_WRITERS = "it is how many threads write a checkpoint; checkpointing_config.num_workers says that."
_INFER = "it is for job_type: Infer; kv.InferContext(model, checkpoint) serves a model."
_NO_INCREMENTS = (
    "it is for incremental updates; kv.Checkpoints(folder, full_every=n) saves deltas in Karvan's format."
)


class MetricsConfig(Foreign):
    """Metrics that PERSIA pushes to a gateway."""

    unused: ClassVar = {
        "push_interval_sec": "it is the seconds between two pushes of metrics; nothing is pushed."
    }
    enable_metrics: bool = False
    job_name: str = ""
    push_interval_seconds: Count = 10


class InferConfig(Foreign):
    """Where an inference job finds its embedding workers and its checkpoint."""

    servers: list[str] = Field(default_factory=list)
    embedding_checkpoint: str | None = None


class CheckpointingConfig(Foreign):
    """Threads that write checkpoints."""

    num_workers: Count = 4


class CommonConfig(Foreign):
    """Settings of all services."""

    older: ClassVar = {"intent": "job_type"}
    unused: ClassVar = {
        "num_embedding_io_workers": _WRITERS,
        "servers": _INFER,
        "initial_sparse_checkpoint": _INFER,
    }
    metrics_config: MetricsConfig = Field(default_factory=MetricsConfig)
    job_type: Literal["Train", "Eval", "Infer"] = "Train"
    infer_config: InferConfig = Field(default_factory=InferConfig)
    checkpointing_config: CheckpointingConfig = Field(default_factory=CheckpointingConfig)


class EmbeddingWorkerConfig(Foreign):
    """Batches that wait for their trainer: how many, and for how long."""

    forward_buffer_size: Count = 1000
    buffered_data_expired_sec: Positive = 1000


class EmbeddingParameterServerConfig(Foreign):
    """Rows of a server. capacity: how many, over all tables; without it there is no limit."""

    unused: ClassVar = {
        "incremental_channel_capacity": _NO_INCREMENTS,
        "full_amount_manager_buffer_size": "it is a queue of rows to be dumped; there is no such queue.",
        "embedding_recycle_pool_capacity": "it is a pool of memory; memory of removed rows is used again.",
        "num_persistence_workers": _WRITERS,
        "num_embedding_io_workers": _WRITERS,
        "num_signs_per_file": "it is the rows of a file; part_bytes of kv.Checkpoints is its size.",
        "storage": "it is where dumps go; a folder, or a URL such as hdfs://host/run, says that.",
        "local_buffer_dir": "dumps are first written there; checkpoints are written where they stay.",
    }
    capacity: Count | None = None
    num_hashmap_internal_shards: Count = 100
    enable_incremental_update: bool = False
    incremental_buffer_size: Count = _BUFFER
    incremental_dir: str | None = None


class GlobalConfig(Foreign):
    """All of it; earlier versions of PERSIA have other names of its sections."""

    older: ClassVar = {
        "middleware_config": "embedding_worker_config",
        "embedding_server_config": "embedding_parameter_server_config",
        "shard_server_config": "embedding_parameter_server_config",
    }
    common_config: CommonConfig = Field(default_factory=CommonConfig)
    embedding_worker_config: EmbeddingWorkerConfig = Field(default_factory=EmbeddingWorkerConfig)
    embedding_parameter_server_config: EmbeddingParameterServerConfig = Field(
        default_factory=EmbeddingParameterServerConfig
    )

    def check(self) -> None:
        """Raise for unsupported keys, and warn of those that only tune."""
        common = self.common_config
        server = self.embedding_parameter_server_config
        if common.job_type == "Infer":
            raise unsupported(
                "global_config.common_config.job_type: Infer, and infer_config",
                "use kv.InferContext(model, checkpoint), where unknown ids give zeros and insert nothing.",
            )
        if server.enable_incremental_update:
            raise unsupported(
                "global_config.embedding_parameter_server_config.enable_incremental_update",
                "use kv.Checkpoints(folder, full_every=n), which saves the rows that changed.",
            )
        warn_of_tuning(
            "nothing is pushed to PERSIA_METRICS_GATEWAY_ADDR; `karvan status JOB` shows a launched job.",
            enable_metrics=(common.metrics_config.enable_metrics, False),
        )
        warn_of_tuning(_INFER, infer_config=(common.infer_config.model_dump(), InferConfig().model_dump()))
        warn_of_tuning(
            "tables have 32 shards; kv.EmbeddingEngine(shards=…) sets another number.",
            num_hashmap_internal_shards=(server.num_hashmap_internal_shards, 100),
        )
        warn_of_tuning(
            _NO_INCREMENTS,
            incremental_buffer_size=(server.incremental_buffer_size, _BUFFER),
            incremental_dir=(server.incremental_dir, None),
        )

    @property
    def capacity(self) -> int | None:
        """The rows of a server, or of a process without servers, over all tables."""
        return self.embedding_parameter_server_config.capacity

    def variables(self, role: Role) -> dict[str, str]:
        """The environment variables of a process of this role."""
        worker = self.embedding_worker_config
        of_role: dict[Role, dict[str, object]] = {
            Role.PARAMETER_SERVER: {"capacity": self.capacity},
            Role.EMBEDDING_WORKER: {
                "embedding_worker_batches": worker.forward_buffer_size,
                "embedding_worker_expire": worker.buffered_data_expired_sec,
            },
        }
        values: dict[str, str] = {}
        set_variables(values, of_role.get(role, {}))
        return values


def read_global_config(path: str | os.PathLike[str] | None = None) -> GlobalConfig:
    """The configuration in a file, or in that of PERSIA_GLOBAL_CONFIG; without both, the defaults."""
    chosen = path or os.environ.get(GLOBAL_CONFIG)
    return read_once(GlobalConfig, chosen, "global_config.yml") if chosen else GlobalConfig()


def with_global_config(spec: JobSpec) -> JobSpec:
    """A job of `karvan launch` whose servers and embedding workers have the limits of its configuration.

    It is that of the environment of the parameter servers, or of the launcher.
    """
    servers, workers = spec.roles.parameter_servers, spec.roles.embedding_workers
    path = servers.env.get(GLOBAL_CONFIG) or os.environ.get(GLOBAL_CONFIG)
    if not path:
        return spec
    config = read_global_config(path)
    if None not in (servers.capacity, config.capacity) and servers.capacity != config.capacity:
        raise SettingsError(
            f"roles.parameter_servers.capacity is {servers.capacity}, and capacity in {path} is "
            f"{config.capacity}: expected one of them, or the same twice."
        )
    environment = {**config.variables(Role.EMBEDDING_WORKER), **workers.env}
    sections = {
        "parameter_servers": servers.model_copy(update={"capacity": config.capacity or servers.capacity}),
        "embedding_workers": workers.model_copy(update={"env": environment}),
    }
    return spec.model_copy(update={"roles": spec.roles.model_copy(update=sections)})
