"""One checkpoint at a path of one's choice, and finding one at a path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.checkpoints import PART_BYTES, Checkpoints
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.manifest import NAME
from karvan.checkpoint.pending import Pending
from karvan.checkpoint.tables import Model, tables_of
from karvan.checkpoint.writing import Writing, check_target


def start(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    model: Model = None,
    *,
    step: int = 0,
    metrics: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
) -> Pending:
    """Begin to save a full checkpoint; training may go on while it is written."""
    target = Path(os.path.abspath(path))
    check_target(target)
    writing = Writing(state, tables_of(model), step=step, metrics=metrics, part_bytes=part_bytes)
    return writing.start(target, lambda: None, lambda _: None)


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    model: Model = None,
    *,
    step: int = 0,
    metrics: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
) -> Checkpoint:
    """Save a full checkpoint and wait until it is complete."""
    return start(path, state, model, step=step, metrics=metrics, part_bytes=part_bytes).wait()


def find(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at a path, or the newest one of a run's folder."""
    folder = Path(path)
    if not (folder / NAME).exists():
        newest = Checkpoints(folder).latest()
        if newest is not None:
            return newest
    if folder.is_dir() and not (folder / NAME).exists():
        raise CheckpointError.mismatch(
            folder, f"a checkpoint, with a {NAME}, or a run's folder with step-… inside", "neither"
        )
    return Checkpoint(folder)
