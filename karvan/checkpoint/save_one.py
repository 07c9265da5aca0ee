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
    """Start to save a full checkpoint, and write it while training continues.

    All ranks of a job call it.

    Args:
        path: The checkpoint's folder, or a URL. A checkpoint that is there already is replaced.
        state: A tree of dicts, lists, numbers, strings and tensors.
        model: The model; its tables are saved.
        step: The step of the checkpoint.
        metrics: Numbers of this step.
        part_bytes: How large the files of a table may become.
        writers: How many threads write files.

    Returns:
        The save, which can be waited for.

    Raises:
        CheckpointError: The folder cannot be written.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> pending = kv.checkpoint.start("twelve", {}, engine, step=3)
        >>> pending.wait().step
        3
    """
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
    """Save a full checkpoint and wait until it is complete.

    All ranks of a job call it.

    Args:
        path: The checkpoint's folder, or a URL. A checkpoint that is there already is replaced.
        state: A tree of dicts, lists, numbers, strings and tensors.
        model: The model; its tables are saved.
        step: The step of the checkpoint.
        metrics: Numbers of this step.
        part_bytes: How large the files of a table may become.
        writers: How many threads write files.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: The folder cannot be written.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> kv.checkpoint.save("thirteen", {"lr": 0.1}, engine).state()
        {'lr': 0.1}
    """
    return start(
        path, state, model, step=step, metrics=metrics, part_bytes=part_bytes, writers=writers
    ).wait()


def resume_at(
    path: str | os.PathLike[str] | Checkpoint, load: Callable[[Checkpoint], T]
) -> tuple[Checkpoint, T]:
    """Load a checkpoint, or the newest intact one of a run's folder, by a function.

    All ranks call it.

    Args:
        path: The checkpoint, or the run's folder.
        load: A function that loads a checkpoint.

    Returns:
        The checkpoint, and what the function returned.

    Raises:
        CheckpointError: There is no intact checkpoint.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.checkpoint.save("fourteen", {"lr": 0.1}, engine)
        >>> checkpoint, state = kv.checkpoint.resume_at(
        ...     "fourteen", lambda checkpoint: checkpoint.load(engine)
        ... )
        >>> state
        {'lr': 0.1}
    """
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
    """Open the checkpoint at a path, or the newest one of a run's folder.

    All ranks call it.

    Args:
        path: The checkpoint, or the run's folder.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: There is none.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.Checkpoints("fifteen").save(5, {}, engine, block=True)
        >>> kv.checkpoint.find("fifteen").step
        5
    """
    folder = local_path(path)
    return chosen(folder, lambda: find_alone(folder))
