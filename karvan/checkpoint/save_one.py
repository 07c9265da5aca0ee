"""Saves one checkpoint at a given path, and finds one at a path."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from karvan import distributed
from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.format.table_arrays import Model, tables_of
from karvan.checkpoint.io.pending_save import WRITERS, Pending, check_writers
from karvan.checkpoint.io.writer import Writing, capture_on_all, check_target
from karvan.checkpoint.manager import PART_BYTES
from karvan.checkpoint.recovery import resume
from karvan.checkpoint.selection import chosen, find_alone, is_checkpoint
from karvan.job.checkpoint_url import local_path

T = TypeVar("T")


def start(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    model: Model = None,
    *,
    step: int = 0,
    metrics: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
    writers: int = WRITERS,
) -> Pending:
    """Start to save a full checkpoint, written while training continues. All ranks of a job call it."""
    check_writers("A save", writers)
    target = Path(os.path.abspath(local_path(path)))
    channel = distributed.current().here

    def take() -> Writing:
        if channel.rank == 0:
            check_target(target)
        return Writing(
            state, tables_of(model), step=step, metrics=metrics, part_bytes=part_bytes, writers=writers
        )

    return capture_on_all(channel, target, take).start(target)


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    model: Model = None,
    *,
    step: int = 0,
    metrics: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
    writers: int = WRITERS,
) -> Checkpoint:
    """Save a full checkpoint and wait until it is complete."""
    return start(
        path, state, model, step=step, metrics=metrics, part_bytes=part_bytes, writers=writers
    ).wait()


def resume_at(
    path: str | os.PathLike[str] | Checkpoint, load: Callable[[Checkpoint], T]
) -> tuple[Checkpoint, T]:
    """A checkpoint, or the newest intact one of a run's folder, and the result of `load`; a collective."""
    if isinstance(path, Checkpoint):
        return path, load(path)
    folder = local_path(path)
    if not is_checkpoint(folder):
        resumed = resume(folder, load)
        if resumed is not None:
            return resumed
    found = find(folder)
    return found, load(found)


def find(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at a path, or the newest one of a run's folder; a collective with the same result."""
    folder = local_path(path)
    return chosen(folder, lambda: find_alone(folder))
