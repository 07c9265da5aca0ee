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
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from karvan import distributed
from karvan.checkpoint.atomic_folder import ABANDONED, DAMAGED, asides, published
from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError, together
from karvan.checkpoint.files import explained, folder_names, has_file, is_there, size_of
from karvan.checkpoint.manifest import NAME
from karvan.checkpoint.safetensors_file import Damage
from karvan.checkpoint.state_tree import tensor_names
from karvan.job.checkpoint_url import local_path, shown, url_of
from karvan.store import Rows

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
    steps = {int(match[1]): name for name in _names_in(folder) if (match := _STEP.match(name))}
    names = [steps[step] for step in sorted(steps)]
    if url_of(folder) is None:
        return [folder / name for name in names if (folder / name).is_dir()]
    with explained(folder):
        complete = {*published(folder, names)}
        return [folder / name for name in names if name in complete]


def _names_in(folder: Path) -> list[str]:
    """The names of what is in a run's folder, sorted; at a URL, those of folders."""
    if url_of(folder) is not None:
        with explained(folder):
            return folder_names(folder)
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


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
    folders = []
    for path in step_folders(folder):
        if (path / NAME).exists() or any(file.is_file() for file in path.rglob("*")):
            folders.append(path)
        elif path.exists() and path not in _reported:
            _reported.add(path)
            _log.warning(
                "%s is empty: expected a checkpoint, with a %s. It is skipped, and a save of its step "
                "renames it.",
                path,
                NAME,
            )
    return folders


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
    states = [_look(path) for path in step_folders(folder)]
    names = _names_in(folder)
    if url_of(folder) is not None:
        with explained(folder):
            kinds = asides(folder, [name for name in names if _STEP.match(name)])
        return states + [
            Survey(folder / name, step_of(folder / name), kind, "set aside") for name, kind in kinds
        ]
    matches = [(folder / name, match) for name in names if (match := _ASIDE.match(name))]
    return states + [Survey(path, int(match[2]), match[1], "set aside") for path, match in matches]


def _look(path: Path) -> Survey:
    step = step_of(path)
    if not has_file(path / NAME):
        return Survey(path, step, "incomplete", f"no {NAME}")
    try:
        chain = Checkpoint(path).chain
    except CheckpointError as error:
        return Survey(path, step, DAMAGED, str(error))
    for checkpoint in chain:
        for file in checkpoint.manifest.files:
            try:
                size = size_of(checkpoint.path / file.name)
            except OSError as error:
                return Survey(path, step, DAMAGED, f"{shown(checkpoint.path / file.name)}: {error.strerror}")
            if size != file.bytes:
                name = shown(checkpoint.path / file.name)
                return Survey(path, step, DAMAGED, f"{name}: expected {file.bytes} bytes, got {size}")
    return Survey(path, step, "whole")


# Which checkpoints a run's folder has; rank 0 reads the folder, the others follow.


def folders(folder: Path) -> list[Path]:
    """The folders that look like checkpoints, oldest first."""
    return [path for path in step_folders(folder) if url_of(path) is not None or has_file(path / NAME)]


def readable(folder: Path) -> list[Checkpoint]:
    """The checkpoints whose manifests can be read, oldest first."""
    checkpoints = []
    for path in folders(folder):
        try:
            checkpoints.append(Checkpoint(path))
        except CheckpointError:
            continue
    return checkpoints


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
        (sign * value, checkpoint.step, checkpoint)
        for checkpoint in among
        if isinstance(value := checkpoint.metrics.get(metric), int | float) and not math.isnan(value)
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
        checkpoint = newest(folder)
        if checkpoint is not None:
            return checkpoint
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
    checkpoints: dict[str, Checkpoint] = {}

    def look() -> list[str]:
        if channel.rank == 0:
            checkpoints.update(
                (str(checkpoint.path.relative_to(folder)), checkpoint) for checkpoint in choose()
            )
        return list(checkpoints)

    def follow() -> dict[str, str]:
        for name in names if channel.rank else ():
            try:
                checkpoints[name] = Checkpoint(folder / name)
            except CheckpointError:
                continue
        return {name: checkpoint.manifest.id for name, checkpoint in checkpoints.items()}

    names = together(channel, folder, look, name_rank=False)[0]
    ids = together(channel, folder, follow, name_rank=False)
    return [checkpoints[name] for name in names if all(its.get(name) == ids[0][name] for its in ids)]


def one_chosen(folder: Path, choose: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """The checkpoint that rank 0 chooses in a folder, or None; all ranks must be able to open it."""
    channel = distributed.current().here
    if channel.world_size == 1:
        return choose()
    attempts: list[str] = []

    def look() -> list[Checkpoint]:
        checkpoints = choose()
        attempts.extend([shown(checkpoints.path)] if checkpoints is not None else [])
        return [checkpoints] if checkpoints is not None else []

    opened = all_chosen(folder, look)

    def require() -> None:
        if attempts and not opened:
            raise CheckpointError(
                folder,
                f"expected all ranks to see {attempts[0]}, as rank 0 does, got some that do not: checkpoints "
                "must be on storage that all ranks share.",
            )

    together(channel, folder, require, name_rank=False)
    return opened[0] if opened else None


def chosen(folder: Path, choose: Callable[[], Checkpoint]) -> Checkpoint:
    """The checkpoint that rank 0 chooses in a folder."""
    checkpoint = one_chosen(folder, choose)
    assert checkpoint is not None
    return checkpoint


# Inspecting checkpoints: their contents, one key's row, damage. Tables are read in parts.


@dataclass(frozen=True)
class HotKey:
    """A key that was used often.

    Attributes:
        key: The key.
        count: How often it was used.
        last_step: The step of its last use.

    Example:
        >>> kv.checkpoint.HotKey(key=7, count=120, last_step=999)
        HotKey(key=7, count=120, last_step=999)
    """

    key: int
    count: int
    last_step: int


@dataclass(frozen=True)
class TableSummary:
    """A table of a checkpoint; of a delta, together with all it builds on.

    Attributes:
        name: The name of the table.
        rows: How many rows it has.
        dim: The number of elements of a vector.
        dtype: The type of vectors.
        optimizer: The kind of optimizer state; None without any.
        state: How many floats of optimizer state a row has.
        bytes: The bytes of the rows.
        mean_norm: The mean L2 norm of vectors; 0 without rows.
        max_norm: The largest L2 norm.
        hottest: The keys that were used most, most first.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> vectors = engine({"user": torch.tensor([7, 8])})
        >>> saved = kv.checkpoint.save("three", {}, engine)
        >>> (table,) = kv.checkpoint.summary("three").tables
        >>> table.name, table.rows, table.dim
        ('user', 2, 4)
    """

    name: str
    rows: int
    dim: int
    dtype: str
    optimizer: str | None
    state: int  # floats of optimizer state in a row
    bytes: int  # of the rows
    mean_norm: float  # L2, of the vectors; 0 without rows
    max_norm: float
    hottest: list[HotKey]  # most used first


@dataclass(frozen=True)
class Summary:
    """A checkpoint in numbers, as `karvan inspect` shows it.

    Attributes:
        path: The checkpoint.
        step: Its step.
        kind: "full" or "delta".
        created: When it was written.
        karvan: The version that has written it.
        metrics: The metrics it was saved with.
        bytes: The bytes of all files, including those of the checkpoints it builds on.
        builds_on: The steps of the checkpoints that a delta needs.
        dense_tensors: How many dense tensors it has.
        dense_bytes: Their bytes.
        tables: Its tables.
        not_whole: Other folders of the run: damaged, incomplete, abandoned.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.checkpoint.save("four", {}, engine, step=7)
        >>> kv.checkpoint.summary("four").step
        7
    """

    path: Path
    step: int
    kind: str
    created: str
    karvan: str
    metrics: dict[str, Any]
    bytes: int  # of all files, including those of the checkpoints it builds on
    builds_on: list[int]  # steps of the checkpoints that a delta needs
    dense_tensors: int
    dense_bytes: int
    tables: list[TableSummary]
    not_whole: list[Survey]  # other entries of a run's folder: damaged, incomplete, abandoned


@dataclass(frozen=True)
class KeyRow:
    """The row of one key.

    Attributes:
        table: The name of the table.
        key: The key.
        vector: The vector.
        state: The optimizer state.
        count: How often the key was used.
        last_step: The step of its last use.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> vectors = engine({"user": torch.tensor([7, 8])})
        >>> saved = kv.checkpoint.save("five", {}, engine)
        >>> kv.checkpoint.row("five", "user", 7).count
        1
    """

    table: str
    key: int
    vector: NDArray[np.float32]
    state: NDArray[np.float32]
    count: int
    last_step: int


def summary(path: str | os.PathLike[str], *, hottest: int = 10) -> Summary:
    """Read the contents of a checkpoint, or of a run's newest one that looks intact.

    All rows are read, and files are checked as they are read.

    Args:
        path: The checkpoint, or the run's folder.
        hottest: How many of the most used keys of each table are listed.

    Returns:
        The checkpoint in numbers.

    Raises:
        DamagedCheckpointError: No checkpoint is intact.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> vectors = engine({"user": torch.tensor([7, 8])})
        >>> saved = kv.checkpoint.save("six", {}, engine)
        >>> [table.rows for table in kv.checkpoint.summary("six").tables]
        [2]
    """
    folder = local_path(path)
    others = [] if has_file(folder / NAME) else survey(folder)
    whole = [other.path for other in others if other.condition == "whole"]
    not_whole = [other for other in others if other.condition != "whole"]
    if not whole and not_whole:
        problems = "; ".join(
            f"{other.path.name} is {other.condition}: {other.problem}" for other in not_whole
        )
        raise DamagedCheckpointError(folder, f"expected an intact checkpoint, got none: {problems}.")
    checkpoint = Checkpoint(whole[-1]) if whole else find_alone(folder)
    manifest = checkpoint.manifest
    return Summary(
        path=checkpoint.path,
        step=checkpoint.step,
        kind=checkpoint.kind,
        created=manifest.created,
        karvan=manifest.karvan,
        metrics=checkpoint.metrics,
        bytes=sum(
            size_of(checkpoint_.path / NAME) + sum(file.bytes for file in checkpoint_.manifest.files)
            for checkpoint_ in checkpoint.chain
        ),
        builds_on=[step_checkpoint.step for step_checkpoint in checkpoint.chain[:-1]],
        dense_tensors=len(list(tensor_names(manifest.state))),
        dense_bytes=manifest.dense.bytes,
        tables=[_table(checkpoint, name, hottest) for name in manifest.tables],
        not_whole=not_whole,
    )


def _table(checkpoint: Checkpoint, name: str, hottest: int) -> TableSummary:
    entry = checkpoint.manifest.tables[name]
    rows, total, largest = 0, 0.0, 0.0
    hot: list[HotKey] = []
    for part in checkpoint.parts(name):
        norms = np.sqrt(np.einsum("ij,ij->i", part.vectors, part.vectors, dtype=np.float64))
        rows += len(norms)
        total += float(norms.sum())
        largest = max(largest, float(norms.max(initial=0.0)))
        hot = _hottest(part, hot, hottest)
    return TableSummary(
        name=name,
        rows=rows,
        dim=entry.dim,
        dtype=entry.dtype,
        optimizer=entry.optimizer,
        state=entry.state,
        bytes=rows * entry.row_bytes,
        mean_norm=total / rows if rows else 0.0,
        max_norm=largest,
        hottest=hot,
    )


def _hottest(part: Rows, before: list[HotKey], count: int) -> list[HotKey]:
    order = np.argsort(-part.counts.astype(np.int64), kind="stable")[:count]
    hot = [HotKey(int(part.keys[i]), int(part.counts[i]), int(part.last_steps[i])) for i in order]
    return sorted([*before, *hot], key=lambda key: (-key.count, key.key))[:count]


def row(path: str | os.PathLike[str], table: str, key: int) -> KeyRow | None:
    """Read the row of one key.

    Only one part of the table is read.

    Args:
        path: The checkpoint, or a run's folder for its newest one.
        table: The name of the table.
        key: The key, signed or unsigned.

    Returns:
        The row; None if the key has none.

    Raises:
        ValueError: The key has more than 64 bits.
        CheckpointError: There is no such table.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> vectors = engine({"user": torch.tensor([7, 8])})
        >>> saved = kv.checkpoint.save("seven", {}, engine)
        >>> kv.checkpoint.row("seven", "user", 7).vector.shape
        (4,)
    """
    if not -(2**63) <= key < 2**64:
        raise ValueError(f"Expected a key of 64 bits, got {key}.")
    rows = find_alone(local_path(path)).row(table, key)
    if rows is None:
        return None
    return KeyRow(
        table, int(rows.keys[0]), rows.vectors[0], rows.state[0], int(rows.counts[0]), int(rows.last_steps[0])
    )


def verify(
    path: str | os.PathLike[str], *, checked: Callable[[Path, int], None] | None = None
) -> list[Damage]:
    """Check every file of a checkpoint, or of all of a run's.

    Args:
        path: The checkpoint, or the run's folder.
        checked: Called with each file and its number of bytes, once it has been read.

    Returns:
        The damaged files.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.checkpoint.save("eight", {}, engine)
        >>> kv.checkpoint.verify("eight")
        []
    """
    folder = local_path(path)
    if has_file(folder / NAME):
        folders = [folder]
    else:
        steps = step_folders(folder) if url_of(folder) is not None else sorted(folder.glob("step-*/"))
        folders = steps or [find_alone(folder).path]
    damaged: dict[Path, Damage] = {}
    for folder_ in folders:
        try:
            damaged |= {damage.path: damage for damage in Checkpoint(folder_).verify(checked)}
        except CheckpointError as error:
            damaged[Path(error.path)] = Damage(Path(error.path), error.problem)
    return list(damaged.values())
