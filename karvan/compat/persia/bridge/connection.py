"""Where the rows of a PERSIA program are: on the servers of its job, over its ranks, or in its process."""

from __future__ import annotations

import os

from karvan import distributed
from karvan.compat.persia.env import get_world_size
from karvan.job.environment import JobEnvironment, variable
from karvan.job.roles import Role

_ADDRESSES = ("PERSIA_NATS_URL", "PERSIA_NATS_IP")


def find_registry() -> str:
    """The address of the job's registry, which stands for NATS; "" for a program without a job.

    Variables of PERSIA are set as Karvan's, for all parts that read those.
    """
    job = JobEnvironment.read()
    if job.registry or any(job.addresses_of(role) for role in _listed()):
        return job.registry
    for name in _ADDRESSES:
        address = os.environ.get(name, "").strip().removeprefix("nats://").rstrip("/")
        if not address:
            continue
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"{name} expects the host:port of the job's registry, which stands for NATS, such as "
                f"localhost:4222, got {address!r}."
            )
        os.environ[variable("registry")] = address
        return address
    return ""


def connect(staleness: int | None) -> None:
    """Connect to the job, unless the program has done so itself.

    staleness: batches between a lookup and its gradient, at most; None: as the job says. Without servers
    every lookup sees all gradients before it, as with 1.
    """
    if distributed.current().chosen:
        return
    if find_registry() or JobEnvironment.read().parameter_server_addresses:
        mode = None if staleness is None else "sync" if staleness == 1 else "hybrid"
        distributed.connect("remote", mode=mode, staleness=staleness)
    elif get_world_size() > 1:
        distributed.connect("sharded")


def _listed() -> tuple[Role, ...]:
    return (Role.PARAMETER_SERVER, Role.EMBEDDING_WORKER, Role.LOADER)
