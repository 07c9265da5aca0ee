"""`run_program`: a Python program whose imports of another system find the adapters."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from karvan.compat.cuda_fallback import cuda_fallback
from karvan.compat.import_aliases import import_aliases
from karvan.compat.process_group import process_group

SYSTEMS: dict[str, dict[str, str]] = {
    "recis": {"recis": "karvan.compat.recis"},
}
"""For each system the packages that its programs import, and what stands for them."""


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
