"""`JobEnvironment`: the environment variables of a job, read and written in one place; and its `SyncMode`.

A field `x` is the variable KARVAN_X, and a field by role has one for each; docs/launch_environment.md has the
tables. The launcher sets the fields of the first part for every process of a job; users set those of the
second part. A variable that is empty counts as not set. A value that is not what its field expects is a
ValueError that names the variable. A name that is almost one of these is a warning, once in a process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

from karvan.job.address import MasterAddress
from karvan.job.roles import Role, all_roles, role_of, start_order

# `ServerLoss`: what a job does when a parameter server crashes.


class ServerLoss(StrEnum):
    """What happens when a parameter server has restarted without the rows that it had.

    ROLLBACK: trainers fail, and a launched job restarts them from the last checkpoint. RELOAD: the server
    loads its rows from the last checkpoint while the others continue; lost updates are counted.
    """

    ROLLBACK = "rollback"
    RELOAD = "reload"


_log = logging.getLogger("karvan.job")

_SET_BY_USERS = (
    *("advertise", "embedding_worker_expire", "embedding_worker_batches", "lease_seconds"),
    *("jobs", "cache", "debug"),
)
TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # of trainers, set by the launcher
NOT_PASSED_ON = ("MASTER_ADDR", "MASTER_PORT")  # where the ranks of another job meet
_USED_BY_TESTS = ("KARVAN_TOKEN", "KARVAN_FUZZ_UNCHECKED")  # the only ones that are no fields
_warned: set[str] = set()  # names of variables, of which a warning is enough
Verbatim: TypeAlias = str  # white space at its ends is a part of it, as in paths


@dataclass(frozen=True)
class JobEnvironment:
    """What a process knows of its job; without a job, the defaults. None and "" are not written.

    data: JSON. owner: the id of the launcher's lease of the folder of checkpoints. counts: how many processes
    each role has, KARVAN_ROLE_COUNT. advertise: the host by which other processes reach this one. addresses:
    "host:port" by index, for jobs without a registry, of each role that listens, KARVAN_ROLE_ADDRESSES.
    process: a random id of this process. master_address_file: see `MasterAddress`. jobs: the folder of all
    launched jobs of a user. cache: the folder in which URLs have their working folders.
    """

    # Set by the launcher.
    job: str = ""
    role: Role | None = None
    index: int = 0
    count: int = 1
    registry: str = ""
    master_address_file: Verbatim = ""
    generation: int = 0
    process: str = ""
    mode: str = ""
    staleness: int | None = None
    wire: str = ""
    sharding: str = ""
    global_batches: int | None = None
    max_task_tries: int | None = None
    skip_bad_records: int | None = None
    lr_staleness: bool | None = None
    grads_to_wait: int | None = None
    tolerance: int | None = None
    pull_every: int | None = None
    counts: Mapping[Role, int] = field(default_factory=dict)
    host: str = ""
    port: int = 0
    checkpoints: Verbatim = ""
    owner: str = ""
    data: Verbatim = ""
    threads: int | None = None
    capacity: int | None = None
    token_file: Verbatim = ""
    tls_cert: Verbatim = ""
    tls_key: Verbatim = ""
    tls_ca: Verbatim = ""
    tls_mutual: bool | None = None
    tls_name: str = ""
    on_server_loss: ServerLoss | None = None
    # Set by users.
    advertise: str = ""
    addresses: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    embedding_worker_expire: float | None = None
    embedding_worker_batches: int | None = None
    lease_seconds: float | None = None
    jobs: Verbatim = ""
    cache: Verbatim = ""
    debug: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> JobEnvironment:
        """As the variables say; without a mapping, those of this process."""
        variables = os.environ if environment is None else environment
        if environment is None:
            warn_of_misspelled(os.environ)
        values: dict[str, Any] = {}
        for name, kind in names().items():
            text = variables.get(variable(name), "")
            if text.strip():
                values[name] = _value(kind, variable(name), text)
        for name, role_names in _names_by_role().items():
            values[name] = {role: values.pop(field) for role, field in role_names.items() if field in values}
        return cls(**values)

    def variables(self) -> dict[str, str]:
        """What to set for a process so that `read` gives the same there."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, role_names in _names_by_role().items():
            values |= {role_names[role]: value for role, value in values.pop(name).items()}
        return {variable(name): _text(value) for name, value in values.items() if value not in (None, "", ())}

    @property
    def master(self) -> MasterAddress:
        """Where the master is, which has the registry; only if there is a registry."""
        return MasterAddress(self.registry, self.master_address_file)


def variable(field: str) -> str:
    """The name of a field's environment variable."""
    return f"KARVAN_{field.upper()}"


def count_name(role: Role) -> str:
    """The name, as that of a field, under which the number of a role's processes is given."""
    return f"{role.identifier}_count"


def addresses_name(role: Role) -> str:
    """The name, as that of a field, under which the addresses of a role's processes are given."""
    return f"{role.identifier}_addresses"


def _names_by_role() -> dict[str, dict[Role, str]]:
    """For each field by role, the names of its variables."""
    return {
        "counts": {role: count_name(role) for role in start_order()},
        "addresses": {role: addresses_name(role) for role in start_order() if role.listens},
    }


def names() -> dict[str, str]:
    """The names of all variables as those of fields, and their types."""
    kinds = {field.name: str(field.type) for field in fields(JobEnvironment)}
    for name, role_names in _names_by_role().items():
        kind = kinds.pop(name).removeprefix("Mapping[Role, ").removesuffix("]")
        kinds |= dict.fromkeys(role_names.values(), kind)
    return kinds


def warn_of_misspelled(variables: Iterable[str]) -> None:
    """Log a warning for each variable that is almost one of ours; others may be those of other programs."""
    ours = {name.upper() for name in names()}
    for name in variables:
        suffix = name.removeprefix("KARVAN_")
        if suffix == name or suffix in ours or name in _USED_BY_TESTS or name in _warned:
            continue
        import difflib  # only misspelled names need it

        if nearest := difflib.get_close_matches(suffix, sorted(ours), n=1, cutoff=0.8):
            _warned.add(name)
            _log.warning(
                "The environment variable %s is unknown and ignored. Did you mean KARVAN_%s?",
                name,
                nearest[0],
            )


def set_variables(environment: MutableMapping[str, str], values: Mapping[str, object]) -> None:
    """Set the variables of some fields; those that are None stay as they are."""
    for name, value in values.items():
        assert name in names(), name
        if value is not None:
            environment[variable(name)] = _text(value)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _value(kind: str, name: str, text: str) -> Any:
    """The value of a variable, as the type of its field says."""
    if kind == "Verbatim":
        return text
    text, expected = text.strip(), ""
    try:
        match kind.removesuffix(" | None"):
            case "str":
                return text
            case "tuple[str, ...]":
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case "int":
                expected = "a whole number"
                return int(text)
            case "float":
                expected = "seconds"
                return float(text)
            case "bool":
                expected = "0 or 1"
                return {"0": False, "1": True}[text]
            case "Role":
                expected = f"one of {', '.join(all_roles())}"
                return role_of(text)
            case "ServerLoss":
                expected = f"one of {', '.join(ServerLoss)}"
                return ServerLoss(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name} expects {expected}, got {text!r}.") from None
    raise TypeError(f"A field of a JobEnvironment has the type {kind}, which variables cannot have.")


# Those that the launcher sets, which no process takes from the environment of the launcher.
LAUNCHED = tuple(
    variable(name)
    for name in names()
    if name not in (*_SET_BY_USERS, *_names_by_role()["addresses"].values())
)


# Synchronisation modes of jobs on parameter servers: sync, hybrid, async.
#
# | mode | rows | dense parameters |
# |---|---|---|
# | sync | lookups and gradients of all trainers together, staleness 1 | gradients averaged over trainers |
# | hybrid | each trainer by itself, up to `staleness` batches behind | the same |
# | async | the same | on the servers; each trainer pulls them, and pushes its gradients |
#
# What makes a step of dense gradients that were pushed is for `DenseSettings` to say.


@dataclass(frozen=True)
class DenseSettings:
    """Every push a step, at a rate divided by its staleness if lr_staleness; or steps of several pushes.

    With grads_to_wait, that many pushes make a step with their mean, and those more than `tolerance` versions
    behind are rejected, computed again and pushed again. None for both: nobody waits, nothing is rejected.

    pull_every: a trainer takes the servers' parameters before every pull_every-th step. Between two of these
    it makes steps of its own, with its optimizer and its gradients, and still pushes each gradient.
    """

    lr_staleness: bool = False
    grads_to_wait: int | None = None
    tolerance: int | None = None
    pull_every: int = 1

    def __post_init__(self) -> None:
        if type(self.pull_every) is not int or self.pull_every < 1:
            raise ValueError(f"pull_every must be a whole number from 1 on, got {self.pull_every!r}.")
        if self.grads_to_wait is not None and self.grads_to_wait < 1:
            raise ValueError(f"grads_to_wait must be at least 1, got {self.grads_to_wait}.")
        if self.tolerance is not None and self.tolerance < 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance}.")
        if self.lr_staleness and self.rejects:
            raise ValueError(
                "lr_staleness slows down stale pushes, grads_to_wait and tolerance reject them: "
                "expected one or the other, got both."
            )

    @property
    def rejects(self) -> bool:
        """Whether a push may be rejected."""
        return self.grads_to_wait is not None or self.tolerance is not None

    @property
    def together(self) -> int:
        """How many pushes make a step."""
        return self.grads_to_wait or 1

    def refuses(self, staleness: int) -> bool:
        """Whether a push is too many versions behind."""
        return self.rejects and staleness > (self.tolerance or 0)

    def slowed(self, rate: float, staleness: int) -> float:
        """The learning rate for a push so many versions behind."""
        return rate / max(1, staleness) if self.lr_staleness else rate


@dataclass(frozen=True)
class SyncMode:
    """What one mode decides; `MODES` has one object of each.

    joint_rows: lookups and gradients of all trainers are made at once, in rounds. joint_steps: a step has the
    gradients of all trainers, or no trainer makes it.
    """

    name: str
    default_staleness: int = 4
    joint_rows: bool = False
    joint_steps: bool = True
    dense_on_servers: bool = False

    def check_staleness(self, staleness: int) -> None:
        """Raise a ValueError for a number of batches that the mode does not allow."""
        if staleness < 1:
            raise ValueError(f"staleness must be at least 1, got {staleness}.")
        if self.joint_rows and staleness != 1:
            raise ValueError(
                f"mode {self.name} has staleness 1, got {staleness}; modes hybrid and async allow more."
            )

    def check_dense(self, options: Iterable[str]) -> None:
        """Raise a ValueError if options of `DenseSettings` are given that the mode has no use for."""
        names = ", ".join(options)
        if names and not self.dense_on_servers:
            raise ValueError(f"{names} is for mode async, got mode {self.name}.")

    def check_server_loss(self, chosen: ServerLoss) -> None:
        """Raise a ValueError if the mode cannot continue in this way without a server."""
        if self.dense_on_servers and chosen is ServerLoss.RELOAD:
            raise ValueError(
                "on_server_loss reload is for modes sync and hybrid. In mode async a lost server has "
                "dense parameters as well, and only a rollback restores them."
            )

    def gradients_per_step(self, trainers: int, dense: DenseSettings) -> int:
        """How many trainers' gradients make a step."""
        return dense.together if self.dense_on_servers else trainers


SYNC = SyncMode("sync", default_staleness=1, joint_rows=True)
HYBRID = SyncMode("hybrid")
ASYNC = SyncMode("async", joint_steps=False, dense_on_servers=True)
MODES: Mapping[str, SyncMode] = {mode.name: mode for mode in (SYNC, HYBRID, ASYNC)}


def choose_mode(
    mode: str | None, staleness: int | None, environment: Mapping[str, str] | None = None
) -> tuple[SyncMode, int]:
    """The mode and its staleness: as they are given, as a launched job says, or what follows from the other.

    Of a job's staleness nothing is taken if the mode is given as sync. Without anything, the mode is sync.
    """
    job = JobEnvironment.read(environment)
    name = (job.mode or None) if mode is None else mode
    if name is not None and name not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {name!r}.")
    if staleness is None and mode != SYNC.name:
        staleness = job.staleness
    if name is None:
        name = SYNC.name if staleness in (None, 1) else HYBRID.name
    chosen = MODES[name]
    if staleness is None:
        staleness = chosen.default_staleness
    chosen.check_staleness(staleness)
    return chosen, staleness


def choose_dense(
    mode: SyncMode,
    lr_staleness: bool | None,
    grads_to_wait: int | None,
    tolerance: int | None,
    pull_every: int | None,
    environment: Mapping[str, str] | None = None,
) -> DenseSettings:
    """What is given, or what a launched job says; only mode async has any.

    Options of what makes a step are all taken from the program if it gives one of them, since some exclude
    others.
    """
    options: dict[str, Any] = {
        "lr_staleness": lr_staleness,
        "grads_to_wait": grads_to_wait,
        "tolerance": tolerance,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    mode.check_dense([*chosen, *(() if pull_every is None else ("pull_every",))])
    if not mode.dense_on_servers:
        return DenseSettings()
    job = JobEnvironment.read(environment)
    if not chosen:
        chosen = {name: getattr(job, name) for name in options if getattr(job, name) is not None}
    chosen["lr_staleness"] = bool(chosen.get("lr_staleness", False))
    if pull_every is None:
        pull_every = 1 if job.pull_every is None else job.pull_every
    return DenseSettings(**chosen, pull_every=pull_every)
