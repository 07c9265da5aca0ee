"""Synchronisation modes of jobs on parameter servers: sync, hybrid, async.

| mode | rows | dense parameters |
|---|---|---|
| sync | lookups and gradients of all trainers together, staleness 1 | gradients averaged over trainers |
| hybrid | each trainer as it comes, up to `staleness` batches behind | the same |
| async | the same | on the servers; each trainer pulls them, and pushes its gradients |

What makes a step of dense gradients that were pushed is for `DenseSettings` to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODES = ("sync", "hybrid", "async")
_STALENESS = 4  # of the modes that allow it, if nobody says how much


@dataclass(frozen=True)
class DenseSettings:
    """Every push a step, at a rate divided by its staleness if lr_staleness; or steps of several pushes.

    With grads_to_wait, that many pushes make a step with their mean, and those more than `tolerance` versions
    behind are rejected, computed again and pushed again. None for both: nobody waits, nothing is rejected.
    """

    lr_staleness: bool = False
    grads_to_wait: int | None = None
    tolerance: int | None = None

    def __post_init__(self) -> None:
        if self.grads_to_wait is not None and self.grads_to_wait < 1:
            raise ValueError(f"grads_to_wait must be at least 1, got {self.grads_to_wait}.")
        if self.tolerance is not None and self.tolerance < 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance}.")
        if self.lr_staleness and self.rejects:
            raise ValueError(
                "lr_staleness slows down stale pushes, grads_to_wait and tolerance reject them: "
                "expected one or the other, got both."
            )

    @property
    def rejects(self) -> bool:
        """Whether a push may be rejected."""
        return self.grads_to_wait is not None or self.tolerance is not None

    @property
    def together(self) -> int:
        """How many pushes make a step."""
        return self.grads_to_wait or 1


def choose_mode(
    mode: str | None, staleness: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, int]:
    """The mode and its staleness: as they are given, as a launched job says, or what follows from the other.

    Of a job's staleness nothing is taken if the mode is given as sync. Without anything, the mode is sync.
    """
    given = mode
    if mode is None:
        mode = environment.get("KARVAN_MODE") or None
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    if staleness is None and given != "sync":
        text = environment.get("KARVAN_STALENESS", "")
        staleness = int(text) if text else None
    if staleness is None:
        staleness = 1 if mode in (None, "sync") else _STALENESS
    if staleness < 1:
        raise ValueError(f"staleness must be at least 1, got {staleness}.")
    if mode is None:
        mode = "sync" if staleness == 1 else "hybrid"
    if mode == "sync" and staleness != 1:
        raise ValueError(f"mode sync has staleness 1, got {staleness}; modes hybrid and async allow more.")
    return mode, staleness


def choose_dense(
    mode: str,
    lr_staleness: bool | None,
    grads_to_wait: int | None,
    tolerance: int | None,
    environment: Mapping[str, str] = os.environ,
) -> DenseSettings:
    """What is given, or what a launched job says if nothing is; only mode async has any."""
    options: dict[str, Any] = {
        "lr_staleness": lr_staleness,
        "grads_to_wait": grads_to_wait,
        "tolerance": tolerance,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    if mode != "async":
        if chosen:
            raise ValueError(f"{', '.join(chosen)} is for mode async, got mode {mode}.")
        return DenseSettings()
    if not chosen:
        told = {name: environment.get(f"KARVAN_{name.upper()}", "") for name in options}
        chosen = {name: int(text) for name, text in told.items() if text}
    chosen["lr_staleness"] = bool(chosen.get("lr_staleness", False))
    return DenseSettings(**chosen)
