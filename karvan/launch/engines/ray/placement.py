"""Where the processes of a job run in a Ray cluster: placement groups and nodes."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from karvan.job.roles import Role, role_of
from karvan.launch.engines.base import Needs, Process, amount_text

# Which placement groups a job has: servers spread over nodes, trainers packed with their loader.
#
#  parameter-servers, embedding-workers    SPREAD: a bundle for each process, on different nodes if possible
#  loader-I                                PACK: loader I, and the trainers that read from it, on one node if
#                                          possible: trainer J belongs to loader J modulo the loaders
#
# Only processes that a job has for all its time are in groups, because a group cannot grow: trainers of an
# elastic job that come and go, and a process that needs nobody near or far, are placed one by one.


Member = tuple[Role, int]


@dataclass(frozen=True)
class GroupPlan:
    """A group that a job is to have, with a bundle for each of its members."""

    name: str
    strategy: str
    members: tuple[Member, ...]


def plan_groups(replicas: Mapping[Role, int]) -> list[GroupPlan]:
    """The groups of a job that has so many processes of each role for all its time."""
    plans = []
    for role, count in replicas.items():
        if role.spreads and count > 1:
            plans.append(GroupPlan(f"{role}s", "SPREAD", tuple((role, index) for index in range(count))))
        if role.beside:
            center = role_of(role.beside)
            centers = replicas.get(center, 0)
            for number in range(min(centers, count)):
                members = [(role, index) for index in range(number, count, centers)]
                plans.append(GroupPlan(f"{center}-{number}", "PACK", ((center, number), *members)))
    return plans


# `PlacementGroups`: the placement groups of a job in a Ray cluster.
#
# A group has room for all its processes before the first one of them starts, and keeps it while a process is
# restarted. If a node dies, Ray moves its bundles to others; the processes of a group that are alive stay
# where they are.
#
# Groups are detached: a master that is restarted finds them by their names, which have the id of the launch
# in them. The master removes them at the end of the job. If no master comes back, the first actor that ends
# for this reason removes its group (`actor.py`).


@dataclass
class PlacementGroups:
    """The groups of one launch of a job, which are created when their first process is.

    prefix: of their names. on_machine: what each bundle needs besides its process, to be on some machine.
    """

    prefix: str
    needs: Mapping[Role, Needs]
    replicas: Mapping[Role, int]
    on_machine: Mapping[str, float]

    def __post_init__(self) -> None:
        self._plans = plan_groups(self.replicas)
        self._lock = threading.Lock()
        self._groups: dict[str, PlacementGroup] = {}

    def strategy(self, process: Process) -> Any:
        """Ray's scheduling strategy for a process; None if it is in no group."""
        if (plan := self._plan_of(process)) is None:
            return None
        with self._lock:
            group = self._group(plan)
        return PlacementGroupSchedulingStrategy(group, plan.members.index((process.role, process.index)))

    def node_of(self, process: Process) -> str | None:
        """Ray's id of the node that has the bundle of a process; None if none has."""
        plan = self._plan_of(process)
        group = None if plan is None else self._groups.get(plan.name)
        if plan is None or group is None:
            return None
        nodes = placement_group_table(group).get("bundles_to_node_id", {})
        return nodes.get(plan.members.index((process.role, process.index))) or None

    def total_of(self, process: Process) -> dict[str, float]:
        """What the group of a process needs together; empty if it is in none."""
        total: Counter[str] = Counter()
        if (plan := self._plan_of(process)) is not None:
            for role, _ in plan.members:
                total.update(self.needs[role].amounts())
        return dict(total)

    def remove(self) -> None:
        """Remove all of them, also those of an earlier master of this launch; their processes have ended."""
        with self._lock:
            for plan in self._plans:
                with suppress(ValueError, exceptions.RayError):  # there is none, or no cluster any more
                    remove_placement_group(self._groups.get(plan.name) or self._find(plan))
            self._groups.clear()

    def _plan_of(self, process: Process) -> GroupPlan | None:
        member = process.role, process.index
        return next((plan for plan in self._plans if member in plan.members), None)

    def _group(self, plan: GroupPlan) -> PlacementGroup:
        group = self._groups.get(plan.name)
        if group is None:
            with suppress(ValueError):
                group = self._find(plan)
        if group is None or placement_group_table(group).get("state") == "REMOVED":
            bundles = [{**self.needs[role].amounts(), **self.on_machine} for role, _ in plan.members]
            group = placement_group(
                bundles, strategy=plan.strategy, name=self._name_of(plan), lifetime="detached"
            )
        self._groups[plan.name] = group
        return group

    def _find(self, plan: GroupPlan) -> PlacementGroup:
        return get_placement_group(self._name_of(plan))

    def _name_of(self, plan: GroupPlan) -> str:
        return f"{self.prefix}/{plan.name}"


# Where processes run: servers and embedding workers on different nodes, a trainer on the node of its loader.
#
# Processes that a job has for all its time are in placement groups. Others are placed one by
# one, by node affinity: a trainer of an elastic job near a loader. These are wishes: if the node that is
# preferred has no room, Ray takes another one.
#
# Node affinity is also faster when a node dies. Ray itself notices that by missing heartbeats, after a
# quarter of a minute, and only then moves the bundles of its groups. But if the machine refuses connections
# to the node, it has surely ended: its processes then start beside their group, on a node that is preferred.
# Each returns to its place in the group when it is started once more. Until then the place is reserved for
# nothing, so processes that need a GPU wait for Ray instead.


_REFUSED_WITHIN = 1.0  # seconds


class NodePlacement:
    """Knows which process is on which node, and chooses nodes for others.

    needs: of each process of a role.
    """

    def __init__(self, needs: Mapping[Role, Needs], groups: PlacementGroups) -> None:
        self.needs = needs
        self._groups = groups
        self._lock = threading.Lock()
        self._nodes: dict[tuple[Role, int], str] = {}
        self._beside: set[tuple[Role, int]] = set()  # processes that are not in their groups
        self._lost: set[str] = set()  # nodes that Ray takes for alive

    def strategy(self, process: Process) -> Any:
        """Ray's scheduling strategy for a process that is to be started."""
        in_group = self._groups.strategy(process)
        beside = in_group is not None and self._is_stranded(process)
        with self._lock:
            self._nodes.pop((process.role, process.index), None)
            self._beside.discard((process.role, process.index))
            if beside:
                self._beside.add((process.role, process.index))
            elif in_group is not None:
                return in_group
            node = self._preferred(process)
            if node is None:
                return "DEFAULT"
            # Others that are started at the same time have to know of it.
            self._nodes[process.role, process.index] = node
        return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)

    def may_return(self, process: Process) -> bool:
        """Whether a process that waits for room beside its group has its place in the group again."""
        with self._lock:
            beside = (process.role, process.index) in self._beside
        node = self._groups.node_of(process) if beside else None
        return node is not None and not self.is_lost(node)

    def room_text(self, process: Process) -> str:
        """What a process needs and the cluster has, for a line that says why it waits."""
        needs, group = self.needs[process.role], self._groups.total_of(process)
        free, there_is = ray.available_resources(), ray.cluster_resources()
        names = needs.amounts()
        parts = [
            f"{amount_text(name, free.get(name, 0.0))} of {amount_text(name, there_is.get(name, 0.0))}"
            for name in names
        ]
        together = ", ".join(amount_text(name, amount) for name, amount in group.items())
        text = f"needs {needs}{f' ({together} with its placement group)' if together else ''}"
        text += f"; free in the cluster: {', '.join(parts)}"
        if not any(_fits(names, node["Resources"]) for node in living_nodes()):
            text += "; no node is large enough"
        return text

    def note(self, process: Process, node: str) -> None:
        """A process runs on a node."""
        with self._lock:
            self._nodes[process.role, process.index] = node

    def forget(self, process: Process) -> None:
        """A process has ended."""
        with self._lock:
            self._nodes.pop((process.role, process.index), None)

    def is_lost(self, node: str) -> bool:
        """Whether a node is gone. Ray notices the death of a node by missing heartbeats, after half a minute;
        but if its machine refuses connections to it, it has ended.
        """
        for ray_node in living_nodes():
            if ray_node["NodeID"] == node:
                address = ray_node["NodeManagerAddress"], ray_node["NodeManagerPort"]
                try:
                    socket.create_connection(address, timeout=_REFUSED_WITHIN).close()
                except ConnectionRefusedError:
                    with self._lock:
                        self._lost.add(node)
                    return True
                except OSError:  # the machine itself does not answer: it may be the network
                    pass
                return False
        return True

    def _is_stranded(self, process: Process) -> bool:
        """Whether the place of a process is on a node that is gone, which Ray has not noticed yet."""
        node = None if self.needs[process.role].gpus else self._groups.node_of(process)
        return node is not None and self.is_lost(node) and node in self._lost

    def _preferred(self, process: Process) -> str | None:
        living = {node["NodeID"]: node["Resources"] for node in living_nodes()}
        self._lost &= living.keys()
        needs = self.needs[process.role].amounts()
        large_enough: list[str] = [
            node for node, has in living.items() if _fits(needs, has) and node not in self._lost
        ]
        # Ray itself may still choose a node that is lost.
        if large_enough and (process.role.spreads or self._lost):
            count = Counter(node for (role, _), node in self._nodes.items() if role == process.role)
            among_all = Counter(self._nodes.values())
            return min(large_enough, key=lambda node: (count[node], among_all[node], node))
        beside = sorted(place for place in self._nodes if place[0] == process.role.beside)
        if beside:
            near = self._nodes[beside[process.index % len(beside)]]
            return near if near in large_enough else None
        return None


def living_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def _fits(needs: Mapping[str, float], has: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount for name, amount in needs.items())
