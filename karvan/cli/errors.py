"""Errors of the command line; the exit codes are in `karvan/exit_codes.py`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import typer

from karvan import exit_codes
from karvan.exit_codes import DAMAGED, FAILED, INTERRUPTED, OK, PIPE_CLOSED, TEMPORARY, TERMINATED, USAGE
from karvan.job.checkpoint_url import local_path

STOPPED = {"interrupt": INTERRUPTED, "terminate": TERMINATED}  # by `FitResult.stopped`


class CommandError(Exception):
    """An error to be shown as it is, and the exit code that goes with it."""

    def __init__(self, text: str, code: int = USAGE) -> None:
        super().__init__(text)
        self.code = code


def code_of(error: BaseException) -> int:
    """The exit code of an error that a command raised."""
    return error.code if isinstance(error, CommandError) else exit_codes.code_of(error)


def text_of(error: BaseException) -> str:
    """One or two lines: what was expected, what was received, and where, if that helps."""
    return str(error).strip() if isinstance(error, CommandError) else exit_codes.text_of(error)


def show(error: BaseException, *, debug: bool) -> None:
    """Print an error to stderr."""
    if debug:
        traceback.print_exception(error)
    print_error(text_of(error))


def print_error(text: str) -> None:
    """Print `error: …` to stderr, the word in red if there are colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty())  # a terminal folds between words
    console.print(Text.assemble(("error:", "bold red"), " ", text), highlight=False)


# Paths and URLs on the command line.


def folder_of(text: str) -> Path:
    """The path of a folder that may be a URL; see `karvan/job/checkpoint_url.py`."""
    try:
        return local_path(text)
    except ValueError as error:
        raise CommandError(str(error)) from None


def no_url(path: Path | None) -> Path | None:
    """The callback of an option that is a folder of this machine."""
    try:
        return None if path is None else local_path(path)
    except ValueError:
        raise typer.BadParameter(f"expected a folder of this machine, got the URL {path}.") from None


__all__ = [
    "DAMAGED",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "PIPE_CLOSED",
    "STOPPED",
    "TEMPORARY",
    "TERMINATED",
    "USAGE",
]
