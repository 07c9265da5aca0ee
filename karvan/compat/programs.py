"""`run_program`, `run_command`: programs and commands of another system, whose imports find the adapters."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from karvan.compat.cuda_fallback import cuda_fallback
from karvan.compat.import_aliases import import_aliases
from karvan.compat.process_group import process_group

SYSTEMS: dict[str, dict[str, str]] = {
    "recis": {"recis": "karvan.compat.recis", "column_io": "karvan.compat.recis.io"},  # its reader of data
    "persia": {"persia": "karvan.compat.persia"},
    "elasticdl": {
        "elasticdl": "karvan.compat.elasticdl",
        "elasticdl_client": "karvan.compat.elasticdl_client",
        "elasticai_api": "karvan.compat.elasticai_api",
        "elasticdl_preprocessing": "karvan.compat.elasticdl_preprocessing",
    },
}
"""For each system the packages that its programs import, and what stands for them."""

_GROUPS = ("recis",)  # whose programs make a process group of torch; MASTER_ADDR of elasticai_api is another

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
    try:
        group = process_group() if system in _GROUPS else nullcontext()
        with import_aliases(SYSTEMS[system]), cuda_fallback(), group, _command_line(program, arguments):
            runpy.run_path(str(program), run_name="__main__")
    except BaseException as error:
        _Outcome.error = error
        raise


def program_error() -> Exception | None:
    """The error that has ended the program of this process, for what runs at its exit; None without one."""
    error = _Outcome.error or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and error.code:
        return RuntimeError(f"the program has ended with exit code {error.code}")
    return error if isinstance(error, Exception) else None


class _Outcome:
    """How the program has ended."""

    error: BaseException | None = None


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
