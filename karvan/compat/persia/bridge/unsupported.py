"""Options of PERSIA that have no counterpart: errors, or warnings where they only tune speed."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from karvan.compat.unsupported import UnsupportedError


class Tuning(NamedTuple):
    """An option that changes how fast PERSIA is, not what it computes: its value, default and counterpart."""

    name: str
    given: Any
    default: Any
    here: str


def warn_of_tuning(*options: Tuning) -> None:
    """Warn of options that were set and that Karvan does not need."""
    for option in options:
        if option.given != option.default:
            warnings.warn(
                f"{option.name}={option.given!r} of PERSIA has no effect here: {option.here}", stacklevel=3
            )


def unsupported(what: str, instead: str) -> UnsupportedError:
    """The error for something that Karvan's adapter does not have."""
    return UnsupportedError(f"{what} of PERSIA", instead)
