"""`make_engine` and `make_master_engine`: the engines of a job and of its master, by name."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from karvan.job.address import is_loopback
from karvan.job.roles import Role, start_order
from karvan.launch.engines.base import check_machine, name_of, needs_by_role, total_needs
from karvan.launch.engines.local import LocalEngine, Restart
from karvan.launch.role_programs import is_open_to_all
from karvan.launch.run_folder import OUTCOME, RunFolder

if TYPE_CHECKING:
    from karvan.launch.engines.base import Engine
    from karvan.launch.engines.ray.cluster import RayCluster
    from karvan.launch.job_spec import JobSpec
ENGINES = ("local", "ray")
_ATTACHED_GRACE = 60.0  # seconds besides the job's own, in which a job ends whose launcher was killed


def check_engine(name: str, spec: JobSpec, address: str | None = None) -> None:
    """A ValueError if a job does not fit an engine, as far as that is known without a cluster."""
    if name not in ENGINES:
        raise ValueError(f"--engine expects one of {', '.join(ENGINES)}, got {name!r}.")
    if name == "local" and address is not None:
        raise ValueError(
            "--address is the address of a Ray cluster: expected --engine ray, got --engine local."
        )
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError('--engine ray needs: pip install "karvan[ray]"')
    if name == "ray" and is_open_to_all(folder := Path.cwd()):
        raise ValueError(
            "--engine ray expects a current folder that other users cannot write to, because Ray's processes "
            f"import modules from it, got {folder}. Launch from another folder; entry may be a full path."
        )
    if address is None:
        check_machine(spec)
    elif address != "auto" and not re.fullmatch(r"[^/]+:\d+", address):
        raise ValueError(
            "--address expects auto or host:port of a Ray cluster that this machine is a node of, got "
            f"{address}."
        )


@contextmanager
def make_engine(
    name: str,
    write: Callable[[str, str], None],
    spec: JobSpec,
    folder: RunFolder,
    *,
    address: str | None = None,
    launch: str = "",
) -> Iterator[Engine]:
    """The engine of a job while inside; `write(name, line)` receives the output of its processes.

    folder: the run folder of the job. address: that of a running Ray cluster; without one, the Ray engine
    starts a cluster on this machine, which ends when the context does. launch: an id of this launch of the
    job, the same for all its masters. A job that does not fit the cluster is
    a ValueError, and a cluster that cannot be reached a ConnectionError.
    """
    if name == "local":
        yield LocalEngine(write, folder.path, away=spec.master_timeout)
        return
    from karvan.launch.engines.ray.cluster import RayCluster
    from karvan.launch.engines.ray.engine import RayEngine, with_logs

    if address is None:
        write("launcher", "Starting Ray on this machine, which takes some seconds.")
    cluster = RayCluster.connect(address, Path.cwd(), cpus=total_needs(spec).cpus, without=_written(spec))
    names = [name_of(role, index) for role in start_order() for index in range(spec.of_role(role).most)]
    try:
        engine = RayEngine(
            with_logs(folder.shared, names, write),
            cluster,
            job=spec.name,
            launch=launch,
            needs=needs_by_role(spec),
            replicas=lasting_replicas(spec),
            network=uses_network(spec, cluster),
            # Ray limits threads to the CPUs of an actor; locally, a process without `threads` uses all.
            own_threads=frozenset(role for role in start_order() if spec.of_role(role).cpus is None),
            unattended=spec.master_timeout,
        )
        try:
            yield engine
        finally:
            engine.close()
    finally:
        cluster.close()


@contextmanager
def make_master_engine(
    name: str,
    write: Callable[[str, str], None],
    spec: JobSpec,
    folder: RunFolder,
    *,
    address: str | None,
    detach: bool,
) -> Iterator[Engine]:
    """The engine that runs the master of a job, while inside.

    The master is a process of this machine, or an actor of a running Ray cluster, at an address. Errors are
    those of `make_engine`.
    """
    if name != "ray" or address is None:
        away = None if detach else spec.grace + _ATTACHED_GRACE
        yield LocalEngine(
            write,
            folder.path,
            away=away,
            restart=Restart(folder.path / OUTCOME, spec.max_restarts, spec.restart_window),
        )
        return
    from karvan.launch.engines.ray.cluster import RayCluster
    from karvan.launch.engines.ray.master import RayMasterEngine

    cluster = RayCluster.connect(address, Path.cwd(), without=_written(spec))
    try:
        network = uses_network(spec, cluster)
        yield RayMasterEngine(write, cluster, spec, folder, network=network, detach=detach)
    finally:
        cluster.close()


def _written(spec: JobSpec) -> list[Path]:
    """Folders of the job that programs need no copy of."""
    return [path for path in (spec.checkpoints, spec.logs) if path is not None]


def lasting_replicas(spec: JobSpec) -> dict[Role, int]:
    """How many processes of each role the job has for all its time: trainers may come and go."""
    sections = {role: spec.of_role(role) for role in start_order()}
    return {role: 0 if section.varies else section.replicas for role, section in sections.items()}


def uses_network(spec: JobSpec, cluster: RayCluster) -> bool:
    """Whether the roles of a job reach each other over the network; a ValueError if the job forbids it."""
    if cluster.on_this_machine:
        return not is_loopback(spec.host)
    if is_loopback(spec.host):
        raise ValueError(
            "The Ray cluster has several machines, so the job needs a host that all nodes can reach: "
            f"expected an address of this machine, got host: {spec.host}."
        )
    return True
