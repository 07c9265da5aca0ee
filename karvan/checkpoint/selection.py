"""Which checkpoints a run's folder has; rank 0 reads the folder, the others follow."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from karvan import distributed
from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.format.manifest import NAME
from karvan.checkpoint.object_store.files import has_file, is_there
from karvan.checkpoint.rank_agreement import together
from karvan.checkpoint.survey import is_step_name, step_folders
from karvan.job.checkpoint_url import local_path, shown, url_of


def folders(folder: Path) -> list[Path]:
    """The folders that look like checkpoints, oldest first."""
    return [path for path in step_folders(folder) if url_of(path) is not None or has_file(path / NAME)]


def readable(folder: Path) -> list[Checkpoint]:
    """The checkpoints whose manifests can be read, oldest first."""
    found = []
    for path in folders(folder):
        try:
            found.append(Checkpoint(path))
        except CheckpointError:
            continue
    return found


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint; None if there is none. One whose manifest is damaged is an error."""
    for path in reversed(folders(folder)):
        try:
            return Checkpoint(path)
        except CheckpointError:
            if has_file(path / NAME):  # otherwise another process has just removed it
                raise
    return None


def best_of(among: list[Checkpoint], metric: str, mode: str) -> Checkpoint | None:
    """The best by a metric, the newest of equal ones; None if none has it."""
    sign = 1 if mode == "max" else -1
    rated = [
        (sign * value, one.step, one)
        for one in among
        if isinstance(value := one.metrics.get(metric), int | float) and not math.isnan(value)
    ]
    return max(rated, key=lambda entry: entry[:2])[2] if rated else None


def is_imported(path: str | os.PathLike[str]) -> bool:
    """Check whether a folder is a checkpoint that was imported from another system.

    Args:
        path: The folder.

    Returns:
        Whether it is.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.checkpoint.save("eleven", {}, engine)
        >>> kv.checkpoint.is_imported("eleven")
        False
    """
    folder = local_path(path)
    return is_checkpoint(folder) and Checkpoint(folder).origin is not None


def find_alone(folder: Path) -> Checkpoint:
    """The checkpoint at a path, or the newest one of a run's folder, as this process sees it."""
    if not has_file(folder / NAME):
        found = newest(folder)
        if found is not None:
            return found
    if is_there(folder) and not has_file(folder / NAME):
        raise CheckpointError.mismatch(
            folder, f"a checkpoint, with a {NAME}, or a run's folder with step-… inside", "neither"
        )
    return Checkpoint(folder)


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is one checkpoint, not a run's folder, as rank 0 sees it."""
    channel = distributed.current().here
    named = is_step_name(folder.name)
    return bool(together(channel, folder, lambda: named or has_file(folder / NAME), name_rank=False)[0])


def all_chosen(folder: Path, choose: Callable[[], list[Checkpoint]]) -> list[Checkpoint]:
    """The checkpoints that rank 0 chooses in a folder, without those that some rank cannot open."""
    channel = distributed.current().here
    if channel.world_size == 1:
        return choose()
    found: dict[str, Checkpoint] = {}

    def look() -> list[str]:
        if channel.rank == 0:
            found.update((str(one.path.relative_to(folder)), one) for one in choose())
        return list(found)

    def follow() -> dict[str, str]:
        for name in names if channel.rank else ():
            try:
                found[name] = Checkpoint(folder / name)
            except CheckpointError:
                continue
        return {name: one.manifest.id for name, one in found.items()}

    names = together(channel, folder, look, name_rank=False)[0]
    ids = together(channel, folder, follow, name_rank=False)
    return [found[name] for name in names if all(its.get(name) == ids[0][name] for its in ids)]


def one_chosen(folder: Path, choose: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """The checkpoint that rank 0 chooses in a folder, or None; all ranks must be able to open it."""
    channel = distributed.current().here
    if channel.world_size == 1:
        return choose()
    seen: list[str] = []

    def look() -> list[Checkpoint]:
        found = choose()
        seen.extend([shown(found.path)] if found is not None else [])
        return [found] if found is not None else []

    opened = all_chosen(folder, look)

    def require() -> None:
        if seen and not opened:
            raise CheckpointError(
                folder,
                f"expected all ranks to see {seen[0]}, as rank 0 does, got some that do not: checkpoints "
                "must be on storage that all ranks share.",
            )

    together(channel, folder, require, name_rank=False)
    return opened[0] if opened else None


def chosen(folder: Path, choose: Callable[[], Checkpoint]) -> Checkpoint:
    """The checkpoint that rank 0 chooses in a folder."""
    found = one_chosen(folder, choose)
    assert found is not None
    return found
