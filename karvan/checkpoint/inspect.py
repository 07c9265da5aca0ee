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
from karvan.checkpoint.selection import find_alone
from karvan.checkpoint.survey import Survey, step_folders, survey
from karvan.job.checkpoint_url import local_path, url_of
from karvan.store import Rows


@dataclass(frozen=True)
class HotKey:
    """A key, how often it was used, and the step of its last use."""

    key: int
    count: int
    last_step: int


@dataclass(frozen=True)
class TableSummary:
    """A table of a checkpoint; of a delta, together with all it builds on."""

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
    """A checkpoint in numbers."""

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
    """The row of one key."""

    table: str
    key: int
    vector: NDArray[np.float32]
    state: NDArray[np.float32]
    count: int
    last_step: int


def summary(path: str | os.PathLike[str], *, hottest: int = 10) -> Summary:
    """The contents of a checkpoint, or of a run's newest one that looks intact. Reads all rows.

    The files are checked as they are read.
    """
    folder = local_path(path)
    others = [] if has_file(folder / NAME) else survey(folder)
    whole = [each.path for each in others if each.condition == "whole"]
    not_whole = [each for each in others if each.condition != "whole"]
    if not whole and not_whole:
        problems = "; ".join(f"{each.path.name} is {each.condition}: {each.problem}" for each in not_whole)
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
            size_of(one.path / NAME) + sum(file.bytes for file in one.manifest.files)
            for one in checkpoint.chain
        ),
        builds_on=[one.step for one in checkpoint.chain[:-1]],
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
    """The row of one key, found by its hash in one part of the table; None if it has none.

    The key may be given signed or unsigned.
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
    """Check every file of a checkpoint, or of all of a run's; returns the damaged ones.

    checked: called with each file and its number of bytes, once it has been read.
    """
    folder = local_path(path)
    folders = [folder] if has_file(folder / NAME) else _step_folders(folder) or [find_alone(folder).path]
    damaged: dict[Path, Damage] = {}
    for each in folders:
        try:
            damaged |= {damage.path: damage for damage in Checkpoint(each).verify(checked)}
        except CheckpointError as error:
            damaged[Path(error.path)] = Damage(Path(error.path), error.problem)
    return list(damaged.values())


def _step_folders(folder: Path) -> list[Path]:
    return step_folders(folder) if url_of(folder) is not None else sorted(folder.glob("step-*/"))
