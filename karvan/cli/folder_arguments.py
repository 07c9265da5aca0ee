"""Paths and URLs on the command line."""

from __future__ import annotations

from pathlib import Path

import typer

from karvan.cli.errors import CommandError
from karvan.job.checkpoint_url import local_path


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
