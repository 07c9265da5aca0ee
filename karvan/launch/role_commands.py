"""The command line of each role."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from karvan.job.roles import START_ORDER, Role

if TYPE_CHECKING:
    from pathlib import Path

    from karvan.launch.job_spec import JobSpec

Commands = dict[Role, tuple[str, ...]]


def commands_of(spec: JobSpec) -> Commands:
    """The job's programs for trainers, and for loaders if it has one; Karvan's own for all others."""
    programs = {Role.TRAINER: spec.entry, Role.LOADER: spec.loader_entry}
    commands: Commands = {}
    for role in START_ORDER:
        section = spec.of_role(role)
        program = programs.get(role)
        own = ("karvan", "role", role) if program is None else _program(spec, program)
        if section.replicas:
            commands[role] = (sys.executable, "-m", *own, *section.args)
    return commands


def _program(spec: JobSpec, program: Path) -> tuple[str, ...]:
    if spec.system is not None:
        return "karvan", "run", "--as", spec.system, str(program)
    return "karvan.launch.program", str(program)
