"""`Needs`: what a process of a role needs of a machine, and whether one machine has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from karvan.job.roles import Role, start_order

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec, Replicas


@dataclass(frozen=True)
class Needs:
    """What one process needs; memory is in bytes, and `resources` are custom ones of a cluster."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, section: Replicas) -> Needs:
        """As a job says; a process needs a CPU for each of its threads if the job does not say otherwise."""
        cpus = float(section.threads or 1) if section.cpus is None else section.cpus
        return cls(cpus, section.gpus or 0.0, section.memory or 0, dict(section.resources))

    def amounts(self) -> dict[str, float]:
        """By the names that Ray has for them; only those that are needed."""
        all_of_them = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory), **self.resources}
        return {name: amount for name, amount in all_of_them.items() if amount}

    def __str__(self) -> str:
        return ", ".join(amount_text(name, amount) for name, amount in self.amounts().items())


def amount_text(name: str, amount: float) -> str:
    """ "2 CPU", "4 GiB memory"."""
    return f"{amount / 2**30:.3g} GiB memory" if name == "memory" else f"{amount:g} {name}"


def needs_by_role(spec: JobSpec) -> dict[Role, Needs]:
    """What each process of each role needs."""
    return {role: Needs.of(spec.of_role(role)) for role in start_order()}


def total_needs(spec: JobSpec) -> Needs:
    """What all processes that a job may have need together, apart from custom resources."""
    each = [(spec.of_role(role).most, needs) for role, needs in needs_by_role(spec).items()]
    return Needs(
        sum(count * needs.cpus for count, needs in each),
        sum(count * needs.gpus for count, needs in each),
        sum(count * needs.memory for count, needs in each),
    )


def check_machine(spec: JobSpec) -> None:
    """A ValueError if the job says that it needs more than this machine has.

    CPUs count only if the job asks for them by `cpus`: more processes than CPUs are slow, but not wrong.
    """
    for role in start_order():
        if spec.of_role(role).resources:
            raise ValueError(
                f"roles.{role.section}.resources names resources of a cluster's nodes, but this machine "
                "alone has none: expected --engine ray with the --address of a running cluster."
            )
    wanted = {
        "cpus": sum(spec.of_role(role).most * (spec.of_role(role).cpus or 0.0) for role in start_order()),
        "gpus": total_needs(spec).gpus,
        "memory": total_needs(spec).memory,
    }
    for key, amount in wanted.items():
        if amount and amount > (has := _HAS[key]()):
            name = {"cpus": "CPU", "gpus": "GPU", "memory": "memory"}[key]
            raise ValueError(
                f"The job's roles need {amount_text(name, amount)} together (roles.*.{key}), but this "
                f"machine has {amount_text(name, has)}. Reduce {key} or replicas, or use --engine ray with "
                "the --address of a cluster."
            )


def _gpus() -> float:
    import torch  # only for jobs that ask for GPUs

    return float(torch.cuda.device_count())


_HAS: dict[str, Callable[[], float]] = {
    "cpus": lambda: float(len(os.sched_getaffinity(0))),
    "gpus": _gpus,
    "memory": lambda: float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
}
