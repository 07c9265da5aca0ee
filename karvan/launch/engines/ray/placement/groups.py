"""`PlacementGroups`: the placement groups of a job (`group_plan.py`) in a Ray cluster.

A group has room for all its processes before the first one of them starts, and keeps it while a process is
restarted. If a node dies, Ray moves its bundles to others; the processes of a group that are alive stay where
they are.

Groups are detached: a master that is restarted finds them by their names, which have the id of the launch in
them. The master removes them at the end of the job. If no master comes back, the first actor that ends for
this reason removes its group (`actor.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ray import exceptions
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from karvan.job.roles import Role
from karvan.launch.engines.base import Process
from karvan.launch.engines.needs import Needs
from karvan.launch.engines.ray.placement.group_plan import GroupPlan, plan_groups


class PlacementGroups:
    """The groups of one launch of a job, which are created when their first process is.

    prefix: of their names. on_machine: what each bundle needs besides its process, to be on some machine.
    """

    def __init__(
        self,
        prefix: str,
        needs: Mapping[Role, Needs],
        replicas: Mapping[Role, int],
        on_machine: Mapping[str, float],
    ) -> None:
        self._prefix = prefix
        self._needs = needs
        self._on_machine = on_machine
        self._plans = plan_groups(replicas)
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
                total.update(self._needs[role].amounts())
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
            bundles = [{**self._needs[role].amounts(), **self._on_machine} for role, _ in plan.members]
            group = placement_group(
                bundles, strategy=plan.strategy, name=self._name_of(plan), lifetime="detached"
            )
        self._groups[plan.name] = group
        return group

    def _find(self, plan: GroupPlan) -> PlacementGroup:
        return get_placement_group(self._name_of(plan))

    def _name_of(self, plan: GroupPlan) -> str:
        return f"{self._prefix}/{plan.name}"
