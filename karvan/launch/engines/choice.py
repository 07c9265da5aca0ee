"""`make_engine`: the engine of a job by its name."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from karvan.job.loopback import is_loopback
from karvan.job.roles import START_ORDER
from karvan.launch.engines.local import LocalEngine
from karvan.launch.engines.needs import check_machine, needs_by_role, total_needs

if TYPE_CHECKING:
    from karvan.launch.engines.base import Engine
    from karvan.launch.engines.ray.cluster import RayCluster
    from karvan.launch.job_spec import JobSpec

ENGINES = ("local", "ray")


def check_engine(name: str, spec: JobSpec, address: str | None = None) -> None:
    """A ValueError if a job does not fit an engine, as far as that is known without a cluster."""
    if name not in ENGINES:
        raise ValueError(f"--engine expects one of {', '.join(ENGINES)}, got {name!r}.")
    if name == "local" and address is not None:
        raise ValueError("--address is that of a Ray cluster: expected --engine ray, got --engine local.")
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError('--engine ray needs: pip install "karvan[ray]"')
    if address is None:
        check_machine(spec)
    elif address != "auto" and not re.fullmatch(r"[^/]+:\d+", address):
        raise ValueError(
            "--address expects auto or host:port of a Ray cluster that this machine is a node of, got "
            f"{address}."
        )


@contextmanager
def make_engine(
    name: str, write: Callable[[str, str], None], spec: JobSpec, folder: Path, *, address: str | None = None
) -> Iterator[Engine]:
    """The engine of a job while inside; `write(name, line)` receives the output of its processes.

    folder: the run folder of the job. address: that of a running Ray cluster; without one, the Ray engine
    starts a cluster on this machine, which ends when the context does. A job that does not fit the cluster is
    a ValueError, and a cluster that cannot be reached a ConnectionError.
    """
    if name == "local":
        yield LocalEngine(write, folder, away=spec.master_timeout)
        return
    from karvan.launch.engines.ray.cluster import RayCluster
    from karvan.launch.engines.ray.engine import RayEngine
    from karvan.launch.engines.ray.process_logs import ProcessLogs

    without = [path for path in (spec.checkpoints, spec.logs) if path is not None]
    cluster = RayCluster.connect(address, Path.cwd(), cpus=total_needs(spec).cpus, without=without)
    try:
        yield RayEngine(
            ProcessLogs(folder, write).write,
            cluster,
            job=spec.name,
            needs=needs_by_role(spec),
            network=uses_network(spec, cluster),
            # Ray limits threads to the CPUs of an actor; locally, a process without `threads` uses all.
            own_threads=frozenset(role for role in START_ORDER if spec.of_role(role).cpus is None),
            unattended=spec.master_timeout,
        )
    finally:
        cluster.close()


def uses_network(spec: JobSpec, cluster: RayCluster) -> bool:
    """Whether the roles of a job reach each other over the network; a ValueError if the job forbids it."""
    if cluster.on_this_machine:
        return not is_loopback(spec.host)
    several = "The Ray cluster has several machines, so roles reach each other over the network, which needs "
    if spec.tls is None:
        raise ValueError(f"{several}tls in the job, since its token could be read in transit.")
    if is_loopback(spec.host):
        raise ValueError(
            f"{several}a host in the job at which all nodes reach its master: expected an address of this "
            f"machine, got host: {spec.host}."
        )
    return True
