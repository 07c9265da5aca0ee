"""`global_config.yml`: settings of PERSIA's services, as variables of Karvan's roles.

Keys that only tune PERSIA's own machinery cause a warning; those that would change results are errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from karvan.compat.persia.bridge.unsupported import Tuning, unsupported, warn_of_tuning
from karvan.job.environment import JobEnvironment, set_variables
from karvan.job.roles import Role
from karvan.settings.schema import Count, Positive, Section, checked_settings, read_tree

VARIABLE = "PERSIA_GLOBAL_CONFIG"
_SHARDS = 100
_BUFFER = 1_000_000
_INTERVAL = 10


class MetricsConfig(Section):
    """Metrics that PERSIA pushes to a gateway."""

    enable_metrics: bool = False
    job_name: str = ""
    push_interval_seconds: Count = _INTERVAL


class InferConfig(Section):
    """Where an inference job finds its embedding workers and its checkpoint."""

    servers: list[str] = Field(default_factory=list)
    embedding_checkpoint: str | None = None


class CheckpointingConfig(Section):
    """Threads that write checkpoints."""

    num_workers: Count = 4


class CommonConfig(Section):
    """Settings of all services."""

    metrics_config: MetricsConfig = Field(default_factory=MetricsConfig)
    job_type: Literal["Train", "Eval", "Infer"] = "Train"
    infer_config: InferConfig = Field(default_factory=InferConfig)
    checkpointing_config: CheckpointingConfig = Field(default_factory=CheckpointingConfig)


class EmbeddingWorkerConfig(Section):
    """Batches that wait for their trainer: how many, and for how long."""

    forward_buffer_size: Count = 1000
    buffered_data_expired_sec: Positive = 1000


class EmbeddingParameterServerConfig(Section):
    """Rows of a server. capacity: how many, over all tables; without it there is no limit."""

    capacity: Count | None = None
    num_hashmap_internal_shards: Count = _SHARDS
    enable_incremental_update: bool = False
    incremental_buffer_size: Count = _BUFFER
    incremental_dir: str | None = None


class GlobalConfig(Section):
    """All of it."""

    common_config: CommonConfig = Field(default_factory=CommonConfig)
    embedding_worker_config: EmbeddingWorkerConfig = Field(default_factory=EmbeddingWorkerConfig)
    embedding_parameter_server_config: EmbeddingParameterServerConfig = Field(
        default_factory=EmbeddingParameterServerConfig
    )

    def check(self) -> None:
        """Raise for unsupported keys, and warn of those that only tune."""
        common = self.common_config
        server = self.embedding_parameter_server_config
        if JobEnvironment.read().job:
            self._check_launched()
        if common.metrics_config.enable_metrics:
            raise unsupported(
                "global_config.common_config.metrics_config.enable_metrics: true",
                "set it to false, and use loggers of kv.Trainer, or karvan status.",
            )
        if common.job_type == "Infer" or common.infer_config != InferConfig():
            raise unsupported(
                "global_config.common_config.job_type: Infer, and infer_config",
                "use kv.InferContext(model, checkpoint), whose unknown ids give zeros and insert nothing.",
            )
        if server.enable_incremental_update or server.incremental_dir is not None:
            raise unsupported(
                "global_config.embedding_parameter_server_config.enable_incremental_update",
                "use kv.Checkpoints(folder, full_every=n), whose deltas have the rows that changed.",
            )
        warn_of_tuning(
            Tuning(
                "num_hashmap_internal_shards",
                server.num_hashmap_internal_shards,
                _SHARDS,
                "tables have 32 shards; kv.EmbeddingEngine(shards=…) sets another number.",
            ),
            Tuning(
                "incremental_buffer_size", server.incremental_buffer_size, _BUFFER, "there are no increments."
            ),
        )

    def _check_launched(self) -> None:
        """Raise for keys of roles that `karvan launch` has started, and not persia-launcher."""
        if self.capacity is not None:
            raise unsupported(
                "embedding_parameter_server_config.capacity in a job of karvan launch",
                "set roles.parameter_servers.capacity of the job.",
            )
        if self.embedding_worker_config != EmbeddingWorkerConfig():
            raise unsupported(
                "embedding_worker_config in a job of karvan launch",
                "set KARVAN_EMBEDDING_WORKER_BATCHES and KARVAN_EMBEDDING_WORKER_EXPIRE in "
                "roles.embedding_workers.env of the job.",
            )

    @property
    def capacity(self) -> int | None:
        """The rows of a server, or of a process without servers, over all tables."""
        return self.embedding_parameter_server_config.capacity

    def variables(self, role: Role) -> dict[str, str]:
        """The environment variables of a process of this role; unsupported keys are errors."""
        self.check()
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
    if not chosen:
        return GlobalConfig()
    if not Path(chosen).is_file():
        raise FileNotFoundError(f"Expected global_config.yml at {chosen}, which does not exist.")
    content = read_tree(Path(chosen))
    return global_config_of({} if content is None else content, str(chosen))


def global_config_of(content: Any, where: str = "The global configuration") -> GlobalConfig:
    """The configuration of a mapping; `where` begins its errors."""
    if isinstance(content, Mapping):
        content = dict(content)
    return checked_settings(GlobalConfig, content, where)
