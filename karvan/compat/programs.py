"""`run_program`, `run_command`: programs and commands of another system, whose imports find the adapters."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from karvan.compat.cuda_fallback import cuda_fallback
from karvan.compat.import_aliases import import_aliases
from karvan.compat.process_group import process_group


class UsageError(ValueError):
    """A command of another system was called, or is to run something, in a way that cannot be."""


SYSTEMS: dict[str, dict[str, str]] = {
    "recis": {"recis": "karvan.compat.recis"},
    "persia": {"persia": "karvan.compat.persia"},
    "elasticdl": {
        "elasticdl": "karvan.compat.elasticdl",
        "elasticai_api": "karvan.compat.elasticai_api",
    },
}
"""For each system the packages that its programs import, and what stands for them."""

COMMANDS = {"elasticdl": "karvan.compat.elasticdl.commands"}
"""Modules of the commands of systems that have some: `COMMANDS`, and `run(command, arguments)`."""


def commands_of(system: str) -> Sequence[str]:
    """The names of a system's commands."""
    if system not in COMMANDS:
        return ()
    names: Sequence[str] = importlib.import_module(COMMANDS[system]).COMMANDS
    return names


def run_command(system: str, command: str, arguments: Sequence[str]) -> int:
    """Run a command of a system; returns its exit code."""
    with import_aliases(SYSTEMS[system]), cuda_fallback():
        code: int = importlib.import_module(COMMANDS[system]).run(command, arguments)
        return code


def run_program(system: str, program: Path, arguments: Sequence[str]) -> None:
    """Run a Python file as `python program.py arguments` would; what it raises comes out as it is."""
    with (
        import_aliases(SYSTEMS[system]),
        cuda_fallback(),
        process_group(),
        _command_line(program, arguments),
    ):
        runpy.run_path(str(program), run_name="__main__")


@contextmanager
def _command_line(program: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Arguments and search path of a program that Python starts."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
