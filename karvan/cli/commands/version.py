"""`karvan version`."""

from __future__ import annotations

import platform
from importlib import metadata

import karvan
from karvan.cli.errors import OK
from karvan.cli.output import JSON_PATH, write_json

# Looked up without importing them.
_SHOWN = ("torch", "numpy", "pyarrow")


def version(json_path: str | None = JSON_PATH) -> int:
    """Show the versions of Karvan, Python and main packages.

    \b
    Examples:
      karvan version
      karvan version --json -
    """
    versions = {"karvan": karvan.__version__, "python": platform.python_version()}
    versions |= {name: installed(name) or "not installed" for name in _SHOWN}
    if not write_json(json_path, versions):
        print(
            "karvan",
            ", ".join([karvan.__version__, *(f"{name} {text}" for name, text in list(versions.items())[1:])]),
        )
    return OK


def installed(name: str) -> str | None:
    """The version of a package, if it is installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
