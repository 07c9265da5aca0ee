"""The job's folder as a Ray runtime environment: how its code reaches nodes that do not see the folder.

Ray copies the folder in which the job is launched to its nodes, except what is never needed there, what the
folder's .gitignore and .rayignore name, and the job's own checkpoints and logs. It is meant for programs: a
folder that is too large is an error, because Ray would hold it in the memory of its head node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

MOST_BYTES = 100 << 20
_CACHES = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache")
_NEVER = (".git", ".venv", "venv", "node_modules", *_CACHES)
_IGNORE_FILES = (".gitignore", ".rayignore")


def runtime_environment(folder: Path, without: Iterable[Path] = ()) -> dict[str, Any]:
    """The runtime environment of a folder, without some below it; a ValueError if it is too large."""
    excludes = [*_NEVER, *_inside(folder, without)]
    sizes = _sizes(folder, excludes)
    if (size := sum(sizes.values())) > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        parts = ", ".join(f"{name} ({_megabytes(sizes[name])})" for name in largest)
        raise ValueError(
            f"Nodes get a copy of {folder}, because the job is launched there: expected at most "
            f"{_megabytes(MOST_BYTES)}, got {_megabytes(size)}; the largest: {parts}. Launch from a folder "
            "that has only programs, or list the other files in a file .rayignore."
        )
    return {"working_dir": str(folder), "excludes": excludes}


def _inside(folder: Path, paths: Iterable[Path]) -> list[str]:
    inside = [os.path.relpath(Path(folder, path), folder) for path in paths]
    return [f"/{path}" for path in inside if path != "." and not path.startswith("..")]


def _sizes(folder: Path, excludes: list[str]) -> dict[str, int]:
    """Bytes of each entry of the folder."""
    patterns = [*excludes, *_ignored(folder)]
    sizes: dict[str, int] = {}
    for where, folders, files in os.walk(folder):
        below = Path(where).relative_to(folder)
        folders[:] = [name for name in folders if not _matches(below / name, patterns)]
        for name in files:
            if not _matches(below / name, patterns) and not (path := Path(where, name)).is_symlink():
                first = (below / name).parts[0]
                sizes[first] = sizes.get(first, 0) + path.stat().st_size
    return sizes


def _ignored(folder: Path) -> list[str]:
    """What the ignore files name, as far as plain patterns go; Ray itself understands all of them."""
    found = []
    for name in _IGNORE_FILES:
        if (folder / name).is_file():
            lines = (line.strip() for line in (folder / name).read_text(errors="replace").splitlines())
            found += [line.rstrip("/") for line in lines if line and line[0] not in "#!"]
    return found


def _matches(path: Path, patterns: list[str]) -> bool:
    return any(
        fnmatch(str(path), pattern[1:])
        if pattern.startswith("/")
        else fnmatch(path.name, pattern) or fnmatch(str(path), pattern)
        for pattern in patterns
    )


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
