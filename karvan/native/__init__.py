"""The native core, `karvan._native`; where it is not built, a stand-in whose use is an error that says so.

Modules take it from here (`from karvan.native import _native`), so that what does not use it also works on a
machine that has only torch, triton and numpy. Where it is built, `_native` is the extension module itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["FLOATS", "RULES", "NativeCoreError", "_native", "is_built", "require"]


class NativeCoreError(ImportError):
    """Something needs the native core, and it cannot be imported here."""


class _MissingCore:
    """Stands for the extension module where it cannot be imported."""

    def __init__(self, reason: ImportError) -> None:
        self._reason = reason.with_traceback(None)  # which would hold the frames of all importers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any object
            raise AttributeError(name)
        absent = isinstance(self._reason, ModuleNotFoundError)
        why = "is not built here" if absent else f"cannot be loaded here ({self._reason})"
        raise NativeCoreError(
            f"This needs Karvan's native core, karvan._native, which {why}: install the package with "
            "pip install karvan, or with pip install . in a checkout, which compiles it."
        ) from self._reason


try:
    import karvan._native as _native
except ImportError as error:
    _native = _MissingCore(error)  # type: ignore[assignment]


def is_built() -> bool:
    """Whether the native core is there."""
    return not isinstance(_native, _MissingCore)


def require() -> None:
    """Raise a NativeCoreError now, before anything is begun, if the native core is not there."""
    _ = _native.kernels


# The rules of sparse optimizers, from the table that the native core is compiled with. They are known without
# the core, too: the GPU's kernels do not need it.
_SOURCE = (Path(__file__).parent / "rules.inc").read_text()
_ROWS = re.findall(r"RULE\((\w+), (\d), (\d)\)", _SOURCE)
# The rules by number: floats of optimizer state for each column of a vector, and more floats for the row.
RULES = {name: (int(columns), int(row)) for name, columns, row in _ROWS}
FLOATS = tuple(re.findall(r"NUMBER\((\w+), ", _SOURCE))  # the numbers of each rule
