"""`RayEngine`: processes on the nodes of a Ray cluster, each owned by an actor (`actor.py`).

Actors outlive the process that has created them, so that another master can adopt them by their names; they
end by themselves if none does. Only orders, requests and lines of output travel through Ray: roles talk to
each other directly.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import exceptions

from karvan.job.environment import variable
from karvan.job.roles import Role, all_roles
from karvan.launch.engines.base import Needs, Process
from karvan.launch.engines.keeper import LOG_BYTES, RoleLog
from karvan.launch.engines.local import log_of
from karvan.launch.engines.ray.actor import GROUPS, SETTINGS, RoleActor
from karvan.launch.engines.ray.cluster import NAMESPACE, RayCluster, this_machine
from karvan.launch.engines.ray.handle import RayHandle
from karvan.launch.engines.ray.order import Order
from karvan.launch.engines.ray.placement import NodePlacement, PlacementGroups, living_nodes

# `ProcessLogs`: the logs of processes on other nodes, as files in the run folder of their job.


class ProcessLogs:
    """Writes the lines of processes to their logs, where the local engine has them, and passes them on."""

    def __init__(self, folder: Path, write: Callable[[str, str], None]) -> None:
        self._folder = folder
        self._write = write
        self._lock = threading.Lock()
        self._logs: dict[str, RoleLog] = {}

    def open(self, name: str) -> None:
        """Have a log of a process, which may never write a line."""
        with self._lock:
            self._log_of(name)

    def write(self, name: str, line: str) -> None:
        """Write a line of a process."""
        with self._lock:
            self._log_of(name).write(f"{line}\n".encode(errors="replace"))
        self._write(name, line)

    def _log_of(self, name: str) -> RoleLog:
        if name not in self._logs:
            path = log_of(self._folder, name)
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._logs[name] = RoleLog(str(path), LOG_BYTES)
        return self._logs[name]


_LEAST = 0.0001  # of a resource


class RayEngine:
    """Runs processes on a cluster; `write(name, line)` receives their output.

    launch: an id of this launch of the job. needs: what a process of a role needs. replicas: how many
    processes of a role the job has for all its time. network: whether roles reach each other over the
    network, which needs TLS; otherwise all of them run on this machine. own_threads: the roles whose
    processes choose their number of threads themselves. unattended: seconds after which processes without a
    master end.
    """

    def __init__(
        self,
        write: Callable[[str, str], None],
        cluster: RayCluster,
        *,
        job: str,
        needs: Mapping[Role, Needs],
        launch: str = "",
        replicas: Mapping[Role, int] | None = None,
        network: bool = False,
        own_threads: frozenset[Role] = frozenset(all_roles()),
        unattended: float,
    ) -> None:
        self.write = write
        self._on_machine = {} if network else this_machine_alone()
        self._groups = PlacementGroups(f"{job}/{launch}", needs, replicas or {}, self._on_machine)
        self.placement = NodePlacement(needs, self._groups)
        self.cluster = cluster
        self._job = job
        self._network = network
        self._own_threads = own_threads
        self._unattended = unattended

    def start(self, process: Process, ended: Callable[[Process, int], None]) -> RayHandle:
        """Start a process as soon as there is room for it."""
        name = self._name_of(process)
        return RayHandle(self, process, name, lambda: self._create(process, name), ended)

    def adopt(
        self, process: Process, record: Mapping[str, Any], ended: Callable[[Process, int], None]
    ) -> RayHandle:
        """Take over a process of an earlier master."""
        name = str(record["actor"]) if record else self._name_of(process)
        return RayHandle(self, process, name, lambda: _find(name), ended)

    def close(self) -> None:
        """The job has ended: nothing of it is left in the cluster."""
        self._groups.remove()

    def begin(self, actor: Any, process: Process) -> Any:
        """Have an actor start a process."""
        in_thread = process.role in self._own_threads
        return actor.start.remote(Order.of(process, network=self._network, own_threads=in_thread))

    def _name_of(self, process: Process) -> str:
        number = process.environment.get(variable("process")) or secrets.token_hex(8)
        return f"{self._job}/{process.name}/{number}"

    def _create(self, process: Process, name: str) -> Any:
        """Create an actor that outlives this process."""
        needs = self.placement.needs_of(process.role)
        remote = ray.remote(concurrency_groups=GROUPS)(RoleActor)
        return remote.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            memory=needs.memory or None,
            resources={**needs.resources, **self._on_machine},
            runtime_env={"env_vars": SETTINGS},
            scheduling_strategy=self.placement.strategy(process),
        ).remote(self._unattended)


def this_machine_alone() -> dict[str, float]:
    """What of Ray's resources only the nodes on this machine have."""
    host = this_machine()
    lives = any(node["NodeManagerAddress"] == host for node in living_nodes())
    return {f"node:{host}": _LEAST} if lives else {}


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError as error:  # it has ended, and nobody knows how
        raise exceptions.RayActorError(error_msg=str(error)) from error
