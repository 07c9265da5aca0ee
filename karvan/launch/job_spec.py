"""The keys of a job.yaml: `karvan launch job.yaml`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from karvan.job.environment import LAUNCHED, NOT_PASSED_ON, TORCH_NAMES, check_former_names
from karvan.job.loopback import is_loopback
from karvan.job.roles import Role
from karvan.job.server_loss import ServerLoss
from karvan.job.sync_modes import MODES, SYNC
from karvan.settings import Count, CountOrZero, Integer, Positive, PositiveOrZero, Section, read_settings


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float | datetime.date) else value


def _as_replicas(value: Any) -> Any:
    return {"replicas": value} if isinstance(value, int) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_as_text)]
Port = Annotated[Integer, Field(ge=0, le=65535)]


class Replicas(Section):
    """The processes of one role; `trainers: 2` is short for `trainers: {replicas: 2}`."""

    replicas: Count = 1
    threads: Count | None = None
    args: list[Text] = Field(default_factory=list)
    env: dict[str, Text] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _sets_no_variable_of_the_launcher(cls, env: dict[str, str]) -> dict[str, str]:
        check_former_names(env)
        for name in env:
            if name in LAUNCHED or name in TORCH_NAMES:
                raise ValueError(f"the launcher sets {name}, so it cannot be set here")
            if name in NOT_PASSED_ON:
                raise ValueError(
                    f"trainers find each other at the job's registry, so {name} has no effect here"
                )
        return env


class Serving(Replicas):
    """A role that listens: replica i on port + i; 0 is any free port."""

    port: Port = 0

    @model_validator(mode="after")
    def _ports_exist(self) -> Serving:
        if self.port and self.port + self.replicas > 65536:
            raise ValueError(f"{self.replicas} replicas from port {self.port} on need ports up to 65535")
        return self


class OptionalServing(Serving):
    """A listening role that is optional."""

    replicas: CountOrZero = 0


class Roles(Section):
    """How many processes of each role."""

    trainers: Annotated[Replicas, BeforeValidator(_as_replicas)] = Replicas()
    parameter_servers: Annotated[Serving, BeforeValidator(_as_replicas)] = Serving()
    embedding_workers: Annotated[OptionalServing, BeforeValidator(_as_replicas)] = OptionalServing()
    loaders: Annotated[OptionalServing, BeforeValidator(_as_replicas)] = OptionalServing()


class TLS(Section):
    """Files in PEM; with `mutual`, clients present a certificate as well."""

    cert: Path
    key: Path
    ca: Path | None = None
    mutual: bool = False

    @model_validator(mode="after")
    def _mutual_has_a_ca(self) -> TLS:
        if self.mutual and self.ca is None:
            raise ValueError("mutual needs the ca by which certificates of clients are checked")
        return self


class Dense(Section):
    """When pushed dense gradients make a step, in mode async; see `karvan.job.sync_modes`."""

    lr_staleness: bool = False
    grads_to_wait: Count | None = None
    tolerance: CountOrZero | None = None

    @model_validator(mode="after")
    def _slows_down_or_rejects(self) -> Dense:
        if self.lr_staleness and (self.grads_to_wait is not None or self.tolerance is not None):
            raise ValueError(
                "lr_staleness slows down stale pushes, grads_to_wait and tolerance reject them, got both"
            )
        return self


class JobSpec(Section):
    """A complete job."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    entry: Path
    loader_entry: Path | None = None
    data: dict[str, Any] | None = None
    mode: Literal["sync", "hybrid", "async"] = "hybrid"
    staleness: Count = 4
    dense: Dense | None = None
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    roles: Roles = Roles()
    checkpoints: Path | None = None
    on_server_loss: ServerLoss = ServerLoss.ROLLBACK
    max_restarts: CountOrZero = 10
    restart_window: Positive = 600.0
    grace: Positive = 60.0
    stall_timeout: PositiveOrZero = 1800.0
    logs: Path | None = None
    host: str = "127.0.0.1"
    registry_port: Port = 0
    token_file: Path | None = None
    tls: TLS | None = None

    @model_validator(mode="before")
    @classmethod
    def _sync_waits_for_every_batch(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("mode") == SYNC.name:
            return {"staleness": SYNC.default_staleness, **value}
        return value

    @field_validator("entry", "loader_entry")
    @classmethod
    def _is_a_program(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix != ".py":
            raise ValueError(f"expected a FILE.py, got '{path}'")
        return path

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        mode = MODES[self.mode]
        mode.check_staleness(self.staleness)
        mode.check_dense(() if self.dense is None else ("dense",))
        if self.loader_entry is not None and self.roles.loaders.replicas == 0:
            raise ValueError("loader_entry is set, but roles.loaders has no replicas")
        mode.check_server_loss(self.on_server_loss)
        if self.on_server_loss is ServerLoss.RELOAD and self.checkpoints is None:
            raise ValueError("on_server_loss reload needs checkpoints, from which rows are restored")
        if self.tls is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines, which needs tls, since the job's "
                "token could be read in transit; "
                "without it only loopback hosts are allowed, such as 127.0.0.1"
            )
        return self

    def of_role(self, role: Role) -> Replicas:
        """The section of a role."""
        sections: dict[Role, Replicas] = {
            Role.TRAINER: self.roles.trainers,
            Role.PARAMETER_SERVER: self.roles.parameter_servers,
            Role.EMBEDDING_WORKER: self.roles.embedding_workers,
            Role.LOADER: self.roles.loaders,
        }
        return sections[role]

    def files(self) -> list[Path]:
        """Files that must exist before anything starts."""
        found = [self.entry, self.loader_entry, self.token_file]
        if self.tls is not None:
            found += [self.tls.cert, self.tls.key, self.tls.ca]
        return [path for path in found if path is not None]


def read_spec(path: Path, changes: Mapping[str, str]) -> JobSpec:
    """Read a job.yaml, with changed values such as {"roles.trainers": "2"}."""
    return read_settings(JobSpec, path, changes)
