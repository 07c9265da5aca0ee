"""A job's master as an actor of a Ray cluster: it supervises the job, so the launcher may end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from karvan.job.address import is_everywhere
from karvan.job.checkpoint_url import url_of
from karvan.job.environment import variable
from karvan.job.roles import Role
from karvan.launch.engines.base import Ended, Needs, Process
from karvan.launch.engines.local import Restart
from karvan.launch.engines.ray.actor import (
    SUSPENDED_AT_MOST,
    Order,
    RoleActor,
    Started,
    location,
    run,
)
from karvan.launch.engines.ray.cluster import NAMESPACE, RayCluster
from karvan.launch.engines.ray.engine import RayEngine, RayHandle, cluster_address, this_machine_alone
from karvan.launch.run_folder import OUTCOME, RunFolder

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec


# `MasterActor`: owns the process of a job's master, on a node of a Ray cluster.
#
# The actor is detached, and Ray restarts it, on another node if its own has died: it has all that it needs in
# its `MasterOrder`, and all that the master must not lose is in the shared folder of the job
# (`karvan/launch/run_folder.py`). It starts the master when it is created:
#
# **The master dies**: its keeper restarts it. **The actor dies**, or its node: the keeper kills the master,
# Ray restarts the actor, and the master that it starts adopts the processes of the job. **The launcher
# dies**: after `unattended` seconds without it, the master is asked to stop the job; that of a detached job
# runs on. **The job has ended**, or its master has died too often: the actor ends for good, some seconds
# after its launcher has heard of it, or without one.


_CHECK_EVERY = 0.5  # seconds
_ENDS_WITHIN = 10.0  # seconds after the end of the job
MARK = "launched"  # a file in the shared folder


@dataclass(frozen=True)
class MasterOrder:
    """A master to run.

    order: its process; the command lacks the run folder. job: the content of job.json. restart: how often its
    keeper restarts it. unattended: None for a detached job. name: of the actor.
    """

    order: Order
    job: Mapping[str, Any]
    restart: Restart
    unattended: float | None
    name: str
    namespace: str

    @property
    def shared(self) -> Path:
        """The folder of what the master must not lose."""
        return Path(self.job["shared"])

    def refusal(self, address: str) -> str:
        """Why this node, which has this address, cannot run the master; "" if it can."""
        if refusal := self.order.refusal(address):
            return refusal
        if (self.shared / MARK).is_file():
            return ""
        return (
            "checkpoints expects a folder that all nodes see, such as one of a network file system, but node "
            f"{address} does not see {self.shared}."
        )

    def prepare(self, process: Process, folder: str, files: Path) -> Process:
        """Leave a run folder among the temporary files, with the job as it is on this node."""
        spec = json.loads(json.dumps(self.job["spec"]))
        environment = process.environment
        spec["token_file"] = environment[variable("token_file")]
        for name in ("cert", "key", "ca") if spec["tls"] is not None else ():
            spec["tls"][name] = environment.get(variable(f"tls_{name}"))
        if self.order.network and not is_everywhere(spec["host"]):
            spec["host"] = location().address
        job = {**self.job, "spec": spec, "host": spec["host"]}
        commands = {
            role: self.order.command_on_node(command, folder)
            for role, command in self.job["commands"].items()
        }
        place = RunFolder(files / "run")
        place.path.mkdir(0o700)
        place.write_job({**job, "commands": commands, "folder": folder})
        return replace(process, command=(*process.command, str(place.path)))


class MasterActor(RoleActor):
    """Runs one master."""

    def __init__(self, order: MasterOrder) -> None:
        address = location().address
        if refusal := order.refusal(address):
            raise ValueError(refusal)
        self._order = order
        super().__init__(0.0 if order.unattended is None else order.unattended)
        outcome = order.restart.unless
        with self._lock:
            if outcome.exists():
                self._output.end(json.loads(outcome.read_bytes())["code"])
                return
            settings = {"restart": order.restart, "logs": order.shared}
            self._handle = run(order.order, self._output, order.prepare, **settings)

    def find(self) -> Started:
        """The process."""
        with self._lock:
            return Started(None if self._handle is None else self._handle.pid)

    def _end_unattended(self) -> None:
        wake, asked = threading.Event(), False
        while True:
            wake.wait(_CHECK_EVERY)
            with self._lock:
                handle = self._handle
            alone, limit = self.unattended(), self._order.unattended
            if self._suspended:
                limit = SUSPENDED_AT_MOST
            if self._output.ended and alone > _ENDS_WITHIN:
                break
            if handle is not None and limit is not None and alone > limit and not asked:
                handle.resume()
                handle.stop()
                asked = True
        with suppress(ray.exceptions.RayError, ValueError):  # so that Ray does not restart it
            ray.kill(ray.get_actor(self._order.name, self._order.namespace))
        os._exit(0)


# `RayMasterEngine`: runs the master of a job as a detached actor, and follows it.
#
# The actor is on the node of the launcher, if that is alive. A job whose shared folder only this machine
# sees, because it has no checkpoints, has its master on this machine.


_UNATTENDED = 20.0  # seconds without a launcher, after which a job that is not detached is stopped
_MEMORY = 1 << 20  # bytes; Ray places an actor that needs nothing on any node, whichever it should be on


class RayMasterEngine(RayEngine):
    """Runs the master of one job; `write(name, line)` receives its output.

    folder: the run folder on this machine. network: whether nodes reach the master over the network.
    """

    lasting: ClassVar[bool] = True

    def __init__(
        self,
        write: Callable[[str, str], None],
        cluster: RayCluster,
        spec: JobSpec,
        folder: RunFolder,
        *,
        network: bool,
        detach: bool,
    ) -> None:
        needs = {Role.MASTER: Needs(cpus=0.0)}
        super().__init__(
            write, cluster, job=folder.name, needs=needs, network=network, unattended=_UNATTENDED
        )
        if spec.checkpoints is None or url_of(spec.checkpoints) is not None:
            self._on_machine = this_machine_alone()  # other nodes do not see the shared folder of the job
        self._spec = spec
        self._folder = folder
        self._detach = detach

    def start(self, process: Process, ended: Ended) -> RayHandle:
        """Start the master of the job that the run folder describes."""
        job = self._folder.job()
        assert job is not None
        name = self._name_of(process)
        programs = tuple(part for command in job["commands"].values() for part in command)
        order = MasterOrder(
            Order.of(process, network=self.network, own_threads=True, programs=programs),
            {**job, "address": cluster_address()},  # "auto" may mean another cluster there
            Restart(Path(job["shared"]) / OUTCOME, self._spec.max_restarts, self._spec.restart_window),
            None if self._detach else self.unattended,
            name,
            NAMESPACE,
        )
        (order.shared / MARK).touch(0o600)
        return RayHandle(self, process, name, lambda: self._create_master(order), ended)

    def begin(self, actor: Any, process: Process) -> Any:
        """The actor has started the process by itself."""
        return actor.find.remote()

    def _create_master(self, order: MasterOrder) -> Any:
        node = ray.get_runtime_context().get_node_id()
        return self._actor(
            MasterActor,
            order.name,
            max_restarts=-1,
            num_cpus=0,
            memory=_MEMORY,
            resources=self._on_machine,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True),
        ).remote(order)
