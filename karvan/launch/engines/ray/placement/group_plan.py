"""Which placement groups a job has: servers spread over nodes, trainers packed with their loader.

    parameter-servers, embedding-workers    SPREAD: a bundle for each process, on different nodes if possible
    loader-I                                PACK: loader I, and the trainers that read from it, on one node if
                                            possible: trainer J belongs to loader J modulo the loaders

Only processes that a job has for all its time are in groups, because a group cannot grow: trainers of an
elastic job that come and go, and a process that needs nobody near or far, are placed one by one
(`nodes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from karvan.job.roles import Role

Member = tuple[Role, int]
_SPREAD = {Role.PARAMETER_SERVER: "parameter-servers", Role.EMBEDDING_WORKER: "embedding-workers"}


@dataclass(frozen=True)
class GroupPlan:
    """A group that a job is to have, with a bundle for each of its members."""

    name: str
    strategy: str
    members: tuple[Member, ...]


def plan_groups(replicas: Mapping[Role, int]) -> list[GroupPlan]:
    """The groups of a job that has so many processes of each role for all its time."""
    plans = []
    for role, name in _SPREAD.items():
        if (count := replicas.get(role, 0)) > 1:
            plans.append(GroupPlan(name, "SPREAD", tuple((role, index) for index in range(count))))
    loaders = replicas.get(Role.LOADER, 0)
    for loader in range(loaders):
        trainers = range(loader, replicas.get(Role.TRAINER, 0), loaders)
        if trainers:
            near = [(Role.TRAINER, index) for index in trainers]
            plans.append(GroupPlan(f"loader-{loader}", "PACK", ((Role.LOADER, loader), *near)))
    return plans
