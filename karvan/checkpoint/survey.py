"""The contents of a run's folder: checkpoints, incomplete ones, and those that were set aside.

| name | what it is |
|---|---|
| `step-…` with a manifest | a checkpoint; whether its files are intact is known once they are read |
| `step-…` without one | incomplete: something has damaged it, since a save publishes only complete folders |
| `damaged-step-…` | was found damaged by a resume, or had the name that a save needed |
| `abandoned-step-…` | later than the checkpoint that a resume was asked to take |

Folders that were set aside are never loaded, counted or pruned. Renaming one back makes it a checkpoint
again.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.format.atomic_folder import ABANDONED, DAMAGED
from karvan.checkpoint.format.manifest import NAME
from karvan.checkpoint.object_store.files import explained, has_file, size_of
from karvan.checkpoint.object_store.objects import folder_names
from karvan.checkpoint.object_store.step_objects import asides, published
from karvan.job.checkpoint_url import local_path, shown, url_of

_log = logging.getLogger(__name__)

_STEP = re.compile(r"^step-(\d{12,})$")
_ASIDE = re.compile(rf"^({DAMAGED}|{ABANDONED})-step-(\d{{12,}})(-\d+)?$")
_reported: set[Path] = set()


@dataclass(frozen=True)
class Survey:
    """A folder of a run, as its name and manifest describe it.

    Attributes:
        path: The folder.
        step: The step that its name says.
        condition: "whole" (according to its manifest), "damaged", "incomplete" or "abandoned".
        problem: What is wrong.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.Checkpoints("nine").save(5, {}, engine, block=True)
        >>> [(each.step, each.condition) for each in kv.checkpoint.survey("nine")]
        [(5, 'whole')]
    """

    path: Path
    step: int
    condition: str  # whole (according to its manifest), damaged, incomplete or abandoned
    problem: str = ""


def step_folders(folder: Path) -> list[Path]:
    """The folders named step-…, oldest first."""
    if url_of(folder) is not None:
        with explained(folder):
            names = [name for name in folder_names(folder) if _STEP.match(name)]
            return sorted((folder / name for name in published(folder, names)), key=step_of)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = {int(match[1]): name for name in names if (match := _STEP.match(name))}
    return [folder / steps[step] for step in sorted(steps) if (folder / steps[step]).is_dir()]


def is_step_name(name: str) -> bool:
    """Whether a name is that of a checkpoint in a run's folder."""
    return _STEP.match(name) is not None


def step_of(path: Path) -> int:
    """The step that a folder's name says."""
    return int(path.name.removeprefix("step-"))


def saved_folders(folder: Path) -> list[Path]:
    """The folders named step-… that are not empty, oldest first; warns once of each empty one."""
    if url_of(folder) is not None:
        return step_folders(folder)
    found = []
    for path in step_folders(folder):
        if (path / NAME).exists() or any(each.is_file() for each in path.rglob("*")):
            found.append(path)
        elif path.exists() and path not in _reported:
            _reported.add(path)
            _log.warning(
                "%s is empty: expected a checkpoint, with a %s. It is skipped, and a save of its step "
                "renames it.",
                path,
                NAME,
            )
    return found


def survey(path: str | os.PathLike[str]) -> list[Survey]:
    """List all checkpoints of a run's folder, oldest first, then those that were set aside.

    It reads manifests and the sizes of files; `verify` reads all of the files.

    Args:
        path: The run's folder.

    Returns:
        The folders.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.Checkpoints("ten").save(5, {}, engine, block=True)
        >>> [each.step for each in kv.checkpoint.survey("ten")]
        [5]
    """
    folder = local_path(path)
    found = [_look(path) for path in step_folders(folder)]
    if url_of(folder) is not None:
        with explained(folder):
            names = [name for name in folder_names(folder) if _STEP.match(name)]
            aside = asides(folder, names)
        paths = [(folder / name, kind) for name, kind in aside]
        return found + [Survey(path, step_of(path), kind, "set aside") for path, kind in paths]
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        if match := _ASIDE.match(name):
            found.append(Survey(folder / name, int(match[2]), match[1], "set aside"))
    return found


def _look(path: Path) -> Survey:
    step = step_of(path)
    if not has_file(path / NAME):
        return Survey(path, step, "incomplete", f"no {NAME}")
    try:
        chain = Checkpoint(path).chain
    except CheckpointError as error:
        return Survey(path, step, DAMAGED, str(error))
    for one in chain:
        for file in one.manifest.files:
            try:
                size = size_of(one.path / file.name)
            except OSError as error:
                return Survey(path, step, DAMAGED, f"{shown(one.path / file.name)}: {error.strerror}")
            if size != file.bytes:
                name = shown(one.path / file.name)
                return Survey(path, step, DAMAGED, f"{name}: expected {file.bytes} bytes, got {size}")
    return Survey(path, step, "whole")
