"""The keys of a job.yaml: `karvan launch job.yaml`."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, field_validator, model_validator
from typing_extensions import override

from karvan.job.address import is_loopback
from karvan.job.environment import LAUNCHED, MODES, NOT_PASSED_ON, SYNC, TORCH_NAMES, ServerLoss
from karvan.job.roles import Role, start_order
from karvan.settings import (
    Count,
    CountOrZero,
    FolderOrURL,
    Integer,
    Positive,
    PositiveOrZero,
    Section,
    read_settings,
)


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float | datetime.date) else value


def _as_replicas(value: Any) -> Any:
    return {"replicas": value} if isinstance(value, int) and not isinstance(value, bool) else value


_UNITS = {"": 1, **{f"{prefix}iB": 1 << 10 * (power + 1) for power, prefix in enumerate("KMGT")}}
_OWN_KEYS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}  # Ray's names of what has a key of its own


def _as_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]iB|)", value.strip())
    if match is None:
        raise ValueError(f"expected bytes, such as 4GiB or 4294967296, got '{value}'")
    return int(float(match[1]) * _UNITS[match[2]])


Text = Annotated[str, BeforeValidator(_as_text)]
Port = Annotated[Integer, Field(ge=0, le=65535)]
Bytes = Annotated[Count, BeforeValidator(_as_bytes)]
Amount = Annotated[Positive, Field(allow_inf_nan=False)]


class Replicas(Section):
    """The processes of one role; `trainers: 2` is short for `trainers: {replicas: 2}`.

    cpus, gpus, memory and resources are what each process needs; see `karvan/launch/engines/base.py`.
    """

    replicas: Count = 1
    threads: Count | None = None
    args: list[Text] = Field(default_factory=list)
    env: dict[str, Text] = Field(default_factory=dict)
    cpus: Amount | None = None
    gpus: Amount | None = None
    memory: Bytes | None = None
    resources: dict[str, Amount] = Field(default_factory=dict)

    @field_validator("gpus")
    @classmethod
    def _is_a_part_of_one_or_whole(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError(f"expected a part of one GPU, or a whole number of them, got {gpus:g}")
        return gpus

    @field_validator("resources")
    @classmethod
    def _has_no_key_of_its_own(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in resources:
            if name in _OWN_KEYS:
                raise ValueError(f"{name} is set by the key {_OWN_KEYS[name]}")
        return resources

    @field_validator("env")
    @classmethod
    def _sets_no_variable_of_the_launcher(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if name in LAUNCHED or name in TORCH_NAMES:
                raise ValueError(f"the launcher sets {name}, so it cannot be set here")
            if name in NOT_PASSED_ON:
                raise ValueError(
                    f"trainers find each other at the job's registry, so {name} has no effect here"
                )
        return env

    @property
    def least(self) -> int:
        """How many there must be for the job to begin."""
        return self.replicas

    @property
    def most(self) -> int:
        """How many there may be."""
        return self.replicas

    @property
    def varies(self) -> bool:
        """Whether their number may change."""
        return self.least != self.most


class Serving(Replicas):
    """A role that listens: replica i on port + i; 0 is any free port."""

    port: Port = 0

    @model_validator(mode="after")
    def _ports_exist(self) -> Serving:
        if self.port and self.port + self.replicas > 65536:
            raise ValueError(f"{self.replicas} replicas from port {self.port} on need ports up to 65535")
        return self


class Trainers(Replicas):
    """Trainers: so many at first, and between min and max of them while the job runs, with dynamic sharding.

    The job begins as soon as `min` of them are there. Without min and max the number is fixed.
    """

    min: Count | None = None
    max: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _starts_with_most(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "replicas" not in value:
            return {**value, "replicas": value.get("max") or value.get("min") or 1}
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Trainers:
        if not self.least <= self.replicas <= self.most:
            raise ValueError(
                f"expected min <= replicas <= max, got {self.least}, {self.replicas} and {self.most}"
            )
        return self

    @property
    @override
    def least(self) -> int:
        return self.min or self.replicas

    @property
    @override
    def most(self) -> int:
        return self.max or self.replicas


class ParameterServers(Serving):
    """Parameter servers; none, for models without rows. capacity: of each, rows over all tables."""

    replicas: CountOrZero = 1
    capacity: Count | None = None


class OptionalServing(Serving):
    """A listening role that is optional."""

    replicas: CountOrZero = 0


Optional = Annotated[OptionalServing, BeforeValidator(_as_replicas)]


class BuiltinRoles(Section):
    """How many processes of each role of Karvan."""

    trainers: Annotated[Trainers, BeforeValidator(_as_replicas)] = Trainers()
    parameter_servers: Annotated[ParameterServers, BeforeValidator(_as_replicas)] = ParameterServers()
    embedding_workers: Optional = OptionalServing()
    loaders: Optional = OptionalServing()


if TYPE_CHECKING:
    Roles = BuiltinRoles
else:
    # A role that is added to the table has a section as well.
    _ALL = {role.section: (Optional, OptionalServing()) for role in start_order()}
    _FURTHER = {name: field for name, field in _ALL.items() if name not in BuiltinRoles.model_fields}
    Roles = create_model("Roles", __base__=BuiltinRoles, **_FURTHER)


class TLS(Section):
    """Files in PEM; with `mutual`, clients present a certificate as well.

    name: that in the certificates of services, if it is not the host by which they are reached.
    """

    cert: Path
    key: Path
    ca: Path | None = None
    mutual: bool = False
    name: str | None = None

    @model_validator(mode="after")
    def _mutual_has_a_ca(self) -> TLS:
        if self.mutual and self.ca is None:
            raise ValueError("mutual needs a ca, to check the certificates of clients")
        return self


class Dense(Section):
    """When pushed dense gradients make a step and new parameters are pulled, in mode async.

    See `DenseSettings` in `karvan/job/environment.py`.
    """

    lr_staleness: bool = False
    grads_to_wait: Count | None = None
    tolerance: CountOrZero | None = None
    pull_every: Count = 1

    @model_validator(mode="after")
    def _slows_down_or_rejects(self) -> Dense:
        if self.lr_staleness and (self.grads_to_wait is not None or self.tolerance is not None):
            raise ValueError(
                "lr_staleness slows down stale pushes, grads_to_wait and tolerance reject them, got both"
            )
        return self


class JobSpec(Section):
    """A complete job. entry: the trainers' program, or a config, which they train by `karvan train`.

    system: what its programs are written for, if that is not Karvan.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    entry: Path
    loader_entry: Path | None = None
    system: Literal["persia"] | None = None
    data: dict[str, Any] | None = None
    mode: Literal["sync", "hybrid", "async"] = "hybrid"
    staleness: Count = 4
    dense: Dense | None = None
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    sharding: Literal["static", "dynamic"] = "static"
    global_batches: Count | None = None
    max_task_tries: Count | None = None
    skip_bad_records: CountOrZero | None = None
    roles: Roles = Roles()
    checkpoints: FolderOrURL | None = None
    on_server_loss: ServerLoss = ServerLoss.ROLLBACK
    on_trainer_loss: Literal["continue", "rollback"] | None = None
    max_restarts: CountOrZero = 10
    restart_window: Positive = 600.0
    grace: Positive = 60.0
    stall_timeout: PositiveOrZero = 1800.0
    master_timeout: Positive = 60.0
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

    @field_validator("entry")
    @classmethod
    def _is_a_program_or_a_config(cls, path: Path) -> Path:
        if path.suffix not in (".py", ".yaml", ".yml"):
            raise ValueError(f"expected a FILE.py or a CONFIG.yaml, got '{path}'")
        return path

    @field_validator("loader_entry")
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
        if self.system is not None and self.sharding == "dynamic":
            raise ValueError(f"system: {self.system} needs sharding: static")
        if self.system is not None and self.entry.suffix != ".py":
            raise ValueError(f"system: {self.system} needs a program, entry: FILE.py, got '{self.entry}'")
        if self.loader_entry is not None and self.roles.loaders.replicas == 0:
            raise ValueError("loader_entry is set, but roles.loaders has no replicas")
        mode.check_server_loss(self.on_server_loss)
        if self.on_server_loss is ServerLoss.RELOAD and self.checkpoints is None:
            raise ValueError("on_server_loss reload needs checkpoints, to restore rows from")
        self._check_sharding()
        return self

    def _check_sharding(self) -> None:
        roles = self.roles
        if self.sharding == "static":
            only_dynamic = {
                "global_batches": self.global_batches is not None,
                "max_task_tries": self.max_task_tries is not None,
                "skip_bad_records": self.skip_bad_records is not None,
                "on_trainer_loss: continue": self.on_trainer_loss == "continue",
                "roles.trainers with min and max": roles.trainers.varies,
                "roles.parameter_servers: 0": not roles.parameter_servers.replicas,
            }
            if names := [name for name, is_given in only_dynamic.items() if is_given]:
                raise ValueError(
                    f"{names[0]} needs sharding: dynamic, because only then do trainers lease their records"
                )
            return
        if MODES[self.mode].dense_on_servers:
            self._check_dynamic_async()
        if roles.embedding_workers.replicas and not (
            roles.parameter_servers.replicas and roles.loaders.replicas
        ):
            raise ValueError(
                "embedding_workers look up rows at parameter_servers, for batches that loaders send: "
                f"expected both roles, got parameter_servers: {roles.parameter_servers.replicas}, "
                f"loaders: {roles.loaders.replicas}"
            )
        if self.on_server_loss is ServerLoss.RELOAD:
            raise ValueError("sharding: dynamic goes back to a checkpoint if a server is lost, got reload")
        if self.global_batches is not None and self.mode != "sync":
            raise ValueError(f"global_batches fixes the bits only in mode sync, got {self.mode}")
        fixed = {"max_task_tries": self.max_task_tries, "skip_bad_records": self.skip_bad_records}
        if self.global_batches is not None and (names := [name for name, n in fixed.items() if n]):
            raise ValueError(
                f"{names[0]} is for records that are leased, but global_batches fixes the records of every "
                "step: expected one of the two"
            )

    def _check_dynamic_async(self) -> None:
        if not self.roles.parameter_servers.replicas:
            raise ValueError("mode async has dense parameters on servers, got roles.parameter_servers: 0")
        if self.dense is not None and (self.dense.grads_to_wait or self.dense.tolerance is not None):
            raise ValueError(
                "sharding: dynamic has neither grads_to_wait nor tolerance, because gradients that wait for "
                "others are lost with their trainer"
            )

    @property
    def continues(self) -> bool:
        """Whether trainers continue without one that dies."""
        return self.sharding == "dynamic" and self.on_trainer_loss != "rollback"

    def of_role(self, role: Role) -> Replicas:
        """The section of a role."""
        section: Replicas = getattr(self.roles, role.section)
        return section

    @property
    def stays_here(self) -> bool:
        """Whether only this machine needs to reach its services, at no port in particular and without TLS."""
        ports = (getattr(self.of_role(role), "port", 0) for role in start_order())
        return self.tls is None and is_loopback(self.host) and not (self.registry_port or any(ports))

    def files(self) -> list[Path]:
        """Files that must exist before anything starts."""
        paths = [self.entry, self.loader_entry, self.token_file]
        if self.tls is not None:
            paths += [self.tls.cert, self.tls.key, self.tls.ca]
        return [path for path in paths if path is not None]


def read_spec(path: Path, changes: Mapping[str, str]) -> JobSpec:
    """Read a job.yaml, with changed values such as {"roles.trainers": "2"}."""
    return read_settings(JobSpec, path, changes)
