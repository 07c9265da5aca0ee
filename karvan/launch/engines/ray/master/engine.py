"""`RayMasterEngine`: runs the master of a job as a detached actor, and follows it (`actor.py`).

The actor is on the node of the launcher, if that is alive. A job whose shared folder only this machine sees,
because it has no checkpoints, has its master on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from karvan.job.environment import variable
from karvan.job.roles import Role
from karvan.launch.engines.base import Process
from karvan.launch.engines.needs import Needs
from karvan.launch.engines.ray.actor import GROUPS, SETTINGS
from karvan.launch.engines.ray.cluster import NAMESPACE, RayCluster
from karvan.launch.engines.ray.engine import this_machine_alone
from karvan.launch.engines.ray.handle import RayHandle
from karvan.launch.engines.ray.master.actor import MARK, MasterActor, MasterOrder
from karvan.launch.engines.ray.order import Order
from karvan.launch.engines.ray.placement.groups import PlacementGroups
from karvan.launch.engines.ray.placement.nodes import NodePlacement

if TYPE_CHECKING:
    from karvan.launch.run_folder import RunFolder

_UNATTENDED = 20.0  # seconds without a launcher, after which a job that is not detached is stopped
_RESTARTED_WITHIN = 300.0  # seconds; Ray notices the death of a node after a while
_MEMORY = 1 << 20  # bytes; Ray places an actor that needs nothing on any node, whichever it should be on
_NEEDS = {Role.MASTER: Needs(cpus=0.0)}


class RayMasterEngine:
    """Runs the master of one job; `write(name, line)` receives its output.

    folder: the run folder on this machine. network: whether nodes reach the master over the network.
    anywhere: whether all nodes see the shared folder of the job. restarts, window: how often the master's
    keeper restarts it.
    """

    def __init__(
        self,
        write: Callable[[str, str], None],
        cluster: RayCluster,
        folder: RunFolder,
        *,
        network: bool,
        anywhere: bool,
        detach: bool,
        restarts: int,
        window: float,
    ) -> None:
        self.write = write
        self.cluster = cluster
        self.placement = NodePlacement(_NEEDS, PlacementGroups("", {}, {}, {}))
        self._folder = folder
        self._network = network
        self._on_machine = {} if network and anywhere else this_machine_alone()
        self._unattended = None if detach else _UNATTENDED
        self._restarts = restarts
        self._window = window

    def start(self, process: Process, ended: Callable[[Process, int], None]) -> MasterHandle:
        """Start the master of the job that the run folder describes."""
        job = self._folder.job()
        assert job is not None
        name = f"{self._folder.name}/{process.name}/{process.environment[variable('process')]}"
        programs = tuple(part for command in job["commands"].values() for part in command)
        order = MasterOrder(
            Order.of(process, network=self._network, own_threads=True, programs=programs),
            {**job, "address": _cluster_address()},  # "auto" may mean another cluster there
            self._restarts,
            self._window,
            self._unattended,
            name,
            NAMESPACE,
        )
        (order.shared / MARK).touch(0o600)
        return MasterHandle(self, process, name, lambda: self._create(order), ended)

    def adopt(
        self, process: Process, record: Mapping[str, Any], ended: Callable[[Process, int], None]
    ) -> MasterHandle:
        """Follow a master that another launcher has started."""
        name = str(record["actor"])
        return MasterHandle(self, process, name, lambda: ray.get_actor(name, NAMESPACE), ended)

    def begin(self, actor: Any, process: Process) -> Any:
        """The actor has started the process by itself."""
        return actor.find.remote()

    def _create(self, order: MasterOrder) -> Any:
        here = ray.get_runtime_context().get_node_id()
        remote = ray.remote(concurrency_groups=GROUPS)(MasterActor)
        return remote.options(
            name=order.name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            memory=_MEMORY,
            resources=self._on_machine,
            runtime_env={"env_vars": SETTINGS},
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True, _spill_on_unavailable=True),
        ).remote(order)


class MasterHandle(RayHandle):
    """The master on some node, which may be restarted on another one."""

    survives_errors = True

    @property
    def record(self) -> dict[str, Any]:
        """How commands find it: the name of its actor, and the address of the cluster."""
        return {**super().record, "address": _cluster_address()}

    def _is_given_up(self, seconds: float) -> bool:
        return seconds > _RESTARTED_WITHIN


def _cluster_address() -> str:
    return str(ray.get_runtime_context().gcs_address)
