"""Inspecting checkpoints: their contents, one key's row, damage. Tables are read in parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from karvan.checkpoint.checkpoint import Checkpoint, Damage
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.format.manifest import NAME
from karvan.checkpoint.format.state_tree import tensor_names
from karvan.checkpoint.object_store.files import has_file, size_of
from karvan.checkpoint.survey import Survey, find_alone, step_folders, survey
from karvan.job.checkpoint_url import local_path, url_of
from karvan.store import Rows


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
    folders = [folder] if has_file(folder / NAME) else _step_folders(folder) or [find_alone(folder).path]
    damaged: dict[Path, Damage] = {}
    for folder_ in folders:
        try:
            damaged |= {damage.path: damage for damage in Checkpoint(folder_).verify(checked)}
        except CheckpointError as error:
            damaged[Path(error.path)] = Damage(Path(error.path), error.problem)
    return list(damaged.values())


def _step_folders(folder: Path) -> list[Path]:
    return step_folders(folder) if url_of(folder) is not None else sorted(folder.glob("step-*/"))
