"""`global_config.yml`: settings of PERSIA's services, as variables of Karvan's roles.

Keys that only tune PERSIA's own machinery, and those that nobody knows, cause a warning; those that would
change results are errors.
"""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import Field

from karvan.compat.persia.bridge.foreign_settings import Foreign, chosen_file, read_once
from karvan.compat.persia.bridge.unsupported import Tuning, unsupported, warn_of_tuning
from karvan.job.environment import set_variables
from karvan.job.roles import Role
from karvan.launch.job_spec import JobSpec
from karvan.settings.schema import Count, Positive, SettingsError

VARIABLE = "PERSIA_GLOBAL_CONFIG"
_SHARDS = 100
_BUFFER = 1_000_000
_INTERVAL = 10
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
    push_interval_seconds: Count = _INTERVAL


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
    num_hashmap_internal_shards: Count = _SHARDS
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
            Tuning(
                "enable_metrics",
                common.metrics_config.enable_metrics,
                False,
                "nothing is pushed to PERSIA_METRICS_GATEWAY_ADDR; `karvan status JOB` shows a launched job.",
            ),
            Tuning("infer_config", common.infer_config.model_dump(), InferConfig().model_dump(), _INFER),
            Tuning(
                "num_hashmap_internal_shards",
                server.num_hashmap_internal_shards,
                _SHARDS,
                "tables have 32 shards; kv.EmbeddingEngine(shards=…) sets another number.",
            ),
            Tuning("incremental_buffer_size", server.incremental_buffer_size, _BUFFER, _NO_INCREMENTS),
            Tuning("incremental_dir", server.incremental_dir, None, _NO_INCREMENTS),
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
        made: dict[str, str] = {}
        set_variables(made, of_role.get(role, {}))
        return made


def read_global_config(path: str | os.PathLike[str] | None = None) -> GlobalConfig:
    """The configuration in a file, or in that of PERSIA_GLOBAL_CONFIG; without both, the defaults."""
    chosen = path or os.environ.get(VARIABLE)
    return read_once(GlobalConfig, chosen_file(chosen, "global_config.yml")) if chosen else GlobalConfig()


def with_global_config(spec: JobSpec) -> JobSpec:
    """A job of `karvan launch` whose servers and embedding workers have the limits of its configuration.

    It is that of the environment of the parameter servers, or of the launcher.
    """
    servers, workers = spec.roles.parameter_servers, spec.roles.embedding_workers
    path = servers.env.get(VARIABLE) or os.environ.get(VARIABLE)
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
