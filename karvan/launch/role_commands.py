"""The command line of each role."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from karvan.job.checkpoint_url import shown
from karvan.job.roles import Role, start_order

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec

Commands = dict[Role, tuple[str, ...]]


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module of Karvan, and imports nothing from the current folder (`-P`)."""
    return sys.executable, "-P", "-m", module, *arguments


def commands_of(spec: JobSpec) -> Commands:
    """The job's programs for trainers, and for loaders if it has one; Karvan's own for all others."""
    commands: Commands = {}
    for role in start_order():
        section = spec.of_role(role)
        program: Path | None = getattr(spec, role.program) if role.program else None
        words = ("karvan", "role", role) if program is None else _program(spec, program)
        if section.replicas:
            commands[role] = module_command(*words, *section.args)
    return commands


def open_import_folders(spec: JobSpec) -> list[Path]:
    """Folders that every user may write to, and from which the job's programs import: their own, and those of
    PYTHONPATH, in which an empty entry is the current folder.
    """
    programs = [path for path in (spec.entry, spec.loader_entry) if path is not None and path.suffix == ".py"]
    folders = [path.resolve().parent for path in programs]
    if variable := os.environ.get("PYTHONPATH"):
        folders += [Path(entry).resolve() for entry in variable.split(os.pathsep)]
    return [folder for folder in dict.fromkeys(folders) if is_open_to_all(folder)]


def is_open_to_all(folder: Path) -> bool:
    """Whether every user of the machine may add files to a folder."""
    return folder.is_dir() and bool(folder.stat().st_mode & stat.S_IWOTH)


def _program(spec: JobSpec, program: Path) -> tuple[str, ...]:
    if spec.system is not None:
        return "karvan", "run", "--as", spec.system, str(program)
    if program.suffix != ".py":  # a config, whose folder is that of the job
        folder = () if spec.checkpoints is None else ("--folder", shown(spec.checkpoints))
        return "karvan", "train", str(program), *folder
    return "karvan.launch.program", str(program)
