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

from karvan.job.roles import Role, role_of

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
