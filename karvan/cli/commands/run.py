"""`karvan run --as SYSTEM PROGRAM`: a program written for another system, with Karvan's adapters."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

from typer import Argument, Option

from karvan.cli.output import FAILED, OK, CommandError
from karvan.errors import code_of_program
from karvan.job.environment import JobEnvironment

# What follows PROGRAM is the program's own.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    program: Path = Argument(metavar="PROGRAM", help="A Python file, or a command of the system."),
    arguments: list[str] = Argument(None, metavar="ARGUMENTS...", help="Those of the program."),
    system: str = Option(
        ..., "--as", metavar="SYSTEM", help="What it is written for: recis, persia or elasticdl."
    ),
) -> int:
    """Run a program that is written for another system.

    It runs as it is. A command of that system works, too.

    Its imports find adapters of that system's names to Karvan's. Without a GPU, a program that asks for one
    runs on the CPU, with a warning. docs/migrating.md says what is supported.

    \b
    Examples:
      karvan run --as recis deepctr.py
      torchrun --nproc_per_node 2 --no-python karvan run --as recis deepctr.py
      karvan run --as elasticdl train --model_zoo models --model_def m.Model
    """
    from karvan.compat.imports import SYSTEMS
    from karvan.compat.programs import commands_of, run_command, run_program
    from karvan.compat.unsupported import UsageError

    if system not in SYSTEMS:
        raise CommandError(f"Expected --as {' | '.join(SYSTEMS)}, got '{system}'.")
    try:
        if str(program) in commands_of(system):
            return run_command(system, str(program), arguments or [])
        if not program.is_file():
            raise UsageError(f"Expected a Python file, but '{program}' does not exist.")
        run_program(system, program, arguments or [])
    except SystemExit as end:
        return _code_of(end)
    except UsageError as error:
        raise CommandError(str(error)) from error
    except Exception as error:  # of the program: its author needs the place
        traceback.print_exception(error.with_traceback(_within(error.__traceback__, str(program))))
        return code_of_program(error) if JobEnvironment.read().job else FAILED
    return OK


def _code_of(end: SystemExit) -> int:
    """The exit code that Python gives a program that ends so."""
    if end.code is None or isinstance(end.code, int):
        return end.code or OK
    print(end.code, file=sys.stderr)
    return FAILED


def _within(place: TracebackType | None, program: str) -> TracebackType | None:
    """The part of a traceback that begins in the program; all of it if none does."""
    at = place
    while at is not None and at.tb_frame.f_code.co_filename != program:
        at = at.tb_next
    return at or place
