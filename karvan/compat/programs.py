"""`run_program`, `run_command`: programs and commands of another system, whose imports find the adapters."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist

from karvan.compat.cuda_fallback import cuda_fallback
from karvan.compat.imports import SYSTEMS, import_aliases
from karvan.distributed import current, disconnect

_SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
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
        group = _process_group() if system in _GROUPS else nullcontext()
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


@contextmanager
def _process_group() -> Iterator[None]:
    """Within it, a process that torchrun has not started has the environment of the only one of a group.

    At the end the environment is as before, and what was connected within it is disconnected.
    """
    grouped, connected = dist.is_initialized(), current().chosen
    with environment({} if "WORLD_SIZE" in os.environ else _SINGLE):
        try:
            yield
        finally:
            if not connected and current().chosen:
                disconnect()
            if not grouped and dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within it, the environment has these variables; at its end, each of them is as before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
