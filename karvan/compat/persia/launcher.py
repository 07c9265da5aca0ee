"""`python -m persia.launcher`: the commands of `persia-launcher`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

_COMMANDS = "karvan.cli.persia_launcher"


def cli(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and end the process with its exit code."""
    sys.exit(importlib.import_module(_COMMANDS).main(arguments))


if __name__ == "__main__":
    cli()
