"""`warm_start`: starts a new model with rows and dense tensors of another checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.checkpoint.checkpoint import (
    KEY,
    TABLE_STEPS,
    Checkpoint,
    Transform,
    check_table,
    load_transforms,
    name_of,
    with_state,
)
from karvan.checkpoint.errors import CheckpointError, together
from karvan.checkpoint.manager import find
from karvan.checkpoint.manifest import share_of
from karvan.checkpoint.table_files import tables_of
from karvan.embedding import TableHandle
from karvan.embedding.optim.base import SparseOptimizer
from karvan.features import FeatureEngine
from karvan.job.checkpoint_url import shown

Patterns: TypeAlias = str | Sequence[str]


@dataclass(frozen=True)
class WarmStart:
    """What a warm start has loaded, and what not.

    `print` shows it as a table.

    Attributes:
        path: The checkpoint.
        step: Its step.
        tables: The tables that were loaded: the model's names, and the checkpoint's.
        rows: How many rows each of them got, by the model's names.
        dense: The dense tensors that were loaded: the model's names, and the checkpoint's.
        left_tables: The checkpoint's tables that were not loaded, and why.
        left_dense: The checkpoint's tensors that were not loaded, and why.
        new_tables: The model's tables that keep their initial rows.
        new_dense: The model's tensors that keep their initial values.
        statistics: The transforms that the checkpoint has statistics for, and why they were not loaded; an
            empty text if they were.

    Example:
        >>> model = kv.models.DLRM([], ids=["user", "item"], dim=8)
        >>> saved = kv.checkpoint.save("sixteen", {"model": model.state_dict()}, model)
        >>> report = kv.checkpoint.warm_start(model, "sixteen")
        >>> sorted(report.tables), report.new_tables
        (['item', 'user'], [])
    """

    path: Path
    step: int
    tables: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  # by the model's names of tables
    dense: dict[str, str] = field(default_factory=dict)
    left_tables: dict[str, str] = field(default_factory=dict)
    left_dense: dict[str, str] = field(default_factory=dict)
    new_tables: list[str] = field(default_factory=list)
    new_dense: list[str] = field(default_factory=list)
    statistics: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        report = [
            (f"table {_arrow(old, new)}", f"{self.rows[new]:,} rows") for new, old in self.tables.items()
        ]
        report += [(f"dense {_arrow(old, new)}", "loaded") for new, old in self.dense.items()]
        report += [
            (f"statistics {name}", f"left in the checkpoint: {why}" if why else "loaded")
            for name, why in self.statistics.items()
        ]
        both = (("table", self.left_tables, self.new_tables), ("dense", self.left_dense, self.new_dense))
        for kind, names, new_names in both:
            report += [(f"{kind} {old}", f"left in the checkpoint: {why}") for old, why in names.items()]
            report += [
                (f"{kind} {name}", "not from the checkpoint: keeps its initial values")
                for name in new_names
                if name not in names
            ]
        width = max((len(what) for what, _ in report), default=0)
        lines = [f"  {what:<{width}}  {outcome}" for what, outcome in report]
        return "\n".join([f"Warm start from {shown(self.path)}, step {self.step}", *lines])


def warm_start(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tables: Patterns = "*",
    rename: Mapping[str, str] | None = None,
    exclude: Patterns = (),
    dense: Patterns = "*",
    optimizer_state: bool = True,
    sparse_optimizer: SparseOptimizer | None = None,
    transforms: Sequence[Transform] = (),
) -> WarmStart:
    """Load rows and dense tensors of a checkpoint, or of a run's newest one, into a model.

    Rows are added to what the tables hold, with their counts, and count as used at the model's current step.
    Names that either side lacks are skipped and reported. If a pattern matches no name, or a shape does not
    fit, nothing changes. Ranks that train together all call it; the report counts the rows of all.

    Args:
        model: The model.
        path: The checkpoint, or the run's folder.
        tables: Shell patterns of the checkpoint's tables to load; `()` loads none.
        rename: The checkpoint's names of tables and tensors, and the model's.
        exclude: Shell patterns of the checkpoint's tables and tensors to skip.
        dense: Shell patterns of the checkpoint's dense tensors to load; `()` loads none. Their names are
            those in the saved `state["model"]`.
        optimizer_state: Whether to load the rows' optimizer state. If either side has none, it is new.
        sparse_optimizer: The model's optimizer of rows. With it, tables continue to count steps where the
            checkpoint's did, by which Adam corrects its moments.
        transforms: Feature engines of the data. They load the statistics that were saved under their names,
            because the dense tensors were trained with features of that scale.

    Returns:
        What was loaded, and what not.

    Raises:
        CheckpointError: A pattern matches nothing, a shape does not fit, or the checkpoint is damaged.

    Example:
        >>> model = kv.models.DLRM([], ids=["user", "item"], dim=8)
        >>> saved = kv.checkpoint.save("old", {"model": model.state_dict()}, model)
        >>> new = kv.models.DLRM([], ids=["user", "item"], dim=8)
        >>> report = kv.checkpoint.warm_start(new, "old", tables="user", dense=())
        >>> report.tables, report.new_tables
        ({'user': 'user'}, ['item'])
    """
    channel = distributed.current().here
    checkpoint = find(path)
    checkpoint.require_intact()
    renamed = dict(rename or {})
    saved: dict[str, Tensor] = {}

    def read() -> None:
        content = checkpoint.state().get("model", {})
        saved.update({name: value for name, value in content.items() if isinstance(value, Tensor)})

    together(channel, checkpoint.path, read)
    all_names = {*checkpoint.manifest.tables, *saved}
    for old in renamed:
        if old not in all_names:
            raise CheckpointError.mismatch(checkpoint.path, f"a table or tensor '{old}' to rename", "none")
    for kind, names, patterns in (("table", checkpoint.manifest.tables, tables), ("tensor", saved, dense)):
        _check_patterns(checkpoint, kind, names, patterns)
    handles = tables_of(model)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    report = WarmStart(checkpoint.path, checkpoint.step)
    _choose(checkpoint.manifest.tables, handles, tables, exclude, renamed, report.tables, report.left_tables)
    _choose(saved, tensors, dense, exclude, renamed, report.dense, report.left_dense)
    report.new_tables.extend(name for name in handles if name not in report.tables)
    report.new_dense.extend(name for name in tensors if name not in report.dense)
    for new, old in report.tables.items():
        entry = checkpoint.manifest.tables[old]
        check_table(checkpoint.path, old, entry, handles[new], optimizer_state=optimizer_state)
    for new, old in report.dense.items():
        if saved[old].shape != tensors[new].shape:
            raise CheckpointError.mismatch(
                checkpoint.path,
                f"tensor '{old}' of shape {tuple(tensors[new].shape)}",
                f"{tuple(saved[old].shape)}; exclude it to skip it",
            )

    with_optimizer = {old for old, entry in checkpoint.manifest.tables.items() if entry.optimizer is not None}

    def take() -> dict[str, int]:
        return {
            new: _take(checkpoint, old, handles[new], optimizer_state and old in with_optimizer)
            for new, old in report.tables.items()
        }

    counts = together(channel, checkpoint.path, take)
    report.rows.update((new, sum(of_rank[new] for of_rank in counts)) for new in report.tables)
    if sparse_optimizer is not None and optimizer_state:
        # Tables count steps from where those of the checkpoint are, if it says so.
        counts_of, steps = checkpoint.state().get(TABLE_STEPS, {}), sparse_optimizer.table_steps()
        sources = {new: old for new, old in report.tables.items() if old in with_optimizer and new in steps}
        continued = {new: counts_of[old] for new, old in sources.items() if old in counts_of}
        sparse_optimizer.set_table_steps({**steps, **continued})
    with torch.no_grad():
        for new, old in report.dense.items():
            tensors[new].copy_(saved[old])  # state_dict() shares memory with the model
    _take_statistics(
        model, checkpoint, report, lambda name: _matches(name, dense) and not _matches(name, exclude)
    )
    state = checkpoint.state() if transforms else {}
    for transform in transforms:
        name = name_of(transform)
        if name not in state.get(KEY, {}):
            continue
        try:
            load_transforms(checkpoint.path, state, transform)
            report.statistics[name] = ""
        except CheckpointError as error:
            report.statistics[name] = error.problem
    return report


def _take_statistics(
    model: nn.Module, checkpoint: Checkpoint, report: WarmStart, selects: Callable[[str], bool]
) -> None:
    """Load the statistics of the model's feature engines: dense tensors were trained with that scale."""
    engines = {
        f"{name}._extra_state".lstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, FeatureEngine) and module.get_extra_state()
    }
    saved = checkpoint.state().get("model", {}) if engines else {}
    for name, engine in engines.items():
        if name not in saved or not selects(name):
            continue
        try:
            engine.set_extra_state(saved[name])
            report.dense[name] = name
        except ValueError as error:
            report.left_dense[name] = f"the model's has other features: {error}"


def _choose(
    saved: Mapping[str, object],
    model_values: Mapping[str, object],
    patterns: Patterns,
    exclude: Patterns,
    rename: Mapping[str, str],
    sources: dict[str, str],
    skipped: dict[str, str],
) -> None:
    for old in saved:
        new = rename.get(old, old)
        if not _matches(old, patterns):
            skipped[old] = "not requested"
        elif _matches(old, exclude):
            skipped[old] = "excluded"
        elif new not in model_values:
            skipped[old] = f"the model has no '{new}'"
        elif new in sources:
            raise ValueError(f"Expected one source for '{new}', got '{sources[new]}' and '{old}'.")
        else:
            sources[new] = old


def _take(checkpoint: Checkpoint, old: str, handle: TableHandle, keep_state: bool) -> int:
    total = 0
    for rows in checkpoint.parts(old, share_of(*handle.store.share)):
        # Steps of another run have no meaning in this one.
        steps = np.full(len(rows.keys), handle.engine_state.step, np.uint32)
        keep = keep_state and handle.optimizer is not None
        handle.load(with_state(rows, handle.initial_state, keep)._replace(last_steps=steps))
        total += len(rows.keys)
    return total


def _check_patterns(checkpoint: Checkpoint, kind: str, names: Iterable[str], patterns: Patterns) -> None:
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            choices = ", ".join(names) or "none"
            raise CheckpointError.mismatch(checkpoint.path, f"a {kind} like '{pattern}'", choices)


def _matches(name: str, patterns: Patterns) -> bool:
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in listed)


def _arrow(old: str, new: str) -> str:
    return old if old == new else f"{old} → {new}"
