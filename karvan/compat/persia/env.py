"""`persia.env`: the place of this process among those of its kind, from the variables of PERSIA or Karvan."""

from __future__ import annotations

import os

from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role

PERSIA_SKIP_CHECK_DATA = os.environ.get("PERSIA_SKIP_CHECK_DATA", "0") not in ("", "0")
PERSIA_LAUNCHER_VERBOSE = os.environ.get("PERSIA_LAUNCHER_VERBOSE", "0") not in ("", "0")


def get_world_size() -> int:
    """The number of trainers; 1 without WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def get_rank() -> int:
    """The number of this trainer; 0 without RANK."""
    return int(os.environ.get("RANK") or 0)


def get_local_rank() -> int:
    """The number of this trainer on its machine; 0 without LOCAL_RANK."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def get_replica_size() -> int:
    """The number of processes of this role: REPLICA_SIZE, or that of the launched job."""
    return int(os.environ.get("REPLICA_SIZE") or _job().count)


def get_replica_index() -> int:
    """The number of this process among them: REPLICA_INDEX, or that of the launched job."""
    return int(os.environ.get("REPLICA_INDEX") or _job().index)


def set_env(
    replica_size: int | None = None,
    replica_index: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
) -> None:
    """Set the place of this process, in its environment; what is None is unset."""
    for name, value in {
        "REPLICA_SIZE": replica_size,
        "REPLICA_INDEX": replica_index,
        "WORLD_SIZE": world_size,
        "RANK": rank,
        "LOCAL_RANK": local_rank,
    }.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def reload_env() -> None:
    """Nothing to do: the environment is read by every call."""


def _job() -> JobEnvironment:
    job = JobEnvironment.read()
    return JobEnvironment() if job.role is Role.TRAINER else job
