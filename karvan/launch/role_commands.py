"""The command line of each role."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from karvan.job.roles import START_ORDER, Role

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec

Commands = dict[Role, tuple[str, ...]]


def commands_of(spec: JobSpec) -> Commands:
    """The job's programs for trainers, and for loaders if it has one; Karvan's own for all others."""
    programs = {Role.TRAINER: spec.entry, Role.LOADER: spec.loader_entry}
    commands: Commands = {}
    for role in START_ORDER:
        section = spec.of_role(role)
        program = programs.get(role)
        own = (
            ("-m", "karvan", "role", role)
            if program is None
            else ("-m", "karvan.launch.program", str(program))
        )
        if section.replicas:
            commands[role] = (sys.executable, *own, *section.args)
    return commands
